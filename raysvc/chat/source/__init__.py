"""Rows of a file to chat messages."""
