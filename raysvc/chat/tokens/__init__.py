"""Text to token ids and a loss mask."""
