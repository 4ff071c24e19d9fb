"""Defines what a chat template may take of a worker: processor time, memory, and the size of what it makes."""
