"""Evals measure a run on rows beside those that it trains, and decide what follows from that."""
