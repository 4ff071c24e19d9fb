"""Finds the seat of this process in a mesh: from its arguments, from torch, or from the environment of its launch."""
