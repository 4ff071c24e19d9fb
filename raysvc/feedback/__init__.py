"""Defines what a trainer says back: outcomes of rows, and decisions that change the steps to come."""
