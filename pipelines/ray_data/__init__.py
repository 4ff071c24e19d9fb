"""Ray Datasets in, Ray Datasets out: rows of one as a source, and the rows of entries as one."""
