"""Functions in C, for work that is too slow in Python."""
