"""Parts on this node: copies of remote parts, memory maps, checksums."""
