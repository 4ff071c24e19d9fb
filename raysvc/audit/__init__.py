"""Defines what is wrong with the rows of a job, found without training: `raysvc audit`."""
