"""Keeps what a server needs in its run folder beside its leases; it alone writes there."""
