"""Rows into arrays: layouts, dummies, denominators, loss weights; and what a plan will cost."""
