"""Drive a group of workers from one process."""
