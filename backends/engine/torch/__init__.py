"""The embedded engine on torch."""
