"""Scripts that `raysvc init --trainer` writes, as they stand here: each trains a job in the trainer of its name."""
