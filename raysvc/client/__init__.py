"""Defines what a trainer attaches with: leases, look-ahead, steps."""
