"""Facilities that every process of this project uses."""
