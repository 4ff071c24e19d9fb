"""An entry that is read while it is built."""
