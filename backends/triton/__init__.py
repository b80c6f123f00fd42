"""Triton's own API, in one place."""
