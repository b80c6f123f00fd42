"""Functions in C, where Python is too slow."""
