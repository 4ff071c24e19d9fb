"""Decide which rows go where, by pure functions of (config, seed, step)."""
