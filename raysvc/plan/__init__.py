"""Which rows go where: pure functions of (config, seed, step)."""
