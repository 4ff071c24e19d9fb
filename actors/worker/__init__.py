"""Workers that train."""
