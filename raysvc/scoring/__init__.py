"""Columns that models compute for the rows of an entry."""
