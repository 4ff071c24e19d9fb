"""A data-parallel rank's arrays for each of the processes that share them."""
