"""Reads rows of source files: pinned to what the scan saw, and decoded as a JSON file of the same rows would bring them."""
