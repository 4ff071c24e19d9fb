"""Order, rows and numbers of rows where a plan goes slice by slice."""
