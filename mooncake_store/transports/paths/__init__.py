"""The choice of network paths and their cost. Pure."""
