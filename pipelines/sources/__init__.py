"""Source files and datasets: list, fingerprint, cut into slices, read."""
