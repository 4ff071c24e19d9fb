"""Render rows by traces: the compiled template runs once on values that note what it does, and rows walk the notes."""
