"""Triton's Python backend API, and the models of the workers."""
