"""Which seat of a mesh this process has: from its arguments, from torch, or from the environment of its launch."""
