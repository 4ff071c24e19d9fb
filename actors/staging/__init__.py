"""Shards from the object store into device memory."""
