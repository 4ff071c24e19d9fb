"""Look at rows, runs, servers and the machine."""
