"""Defines what a job needs of the nodes of a cluster: room for what it starts there, and the files that it reads and writes."""
