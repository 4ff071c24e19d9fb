"""What a server keeps in its run folder beside its leases, and that it alone writes there."""
