"""The embedded engine's computing on torch."""
