"""Routing decisions as JSON, with their outcomes."""
