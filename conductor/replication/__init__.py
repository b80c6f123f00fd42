"""Replication of hot prefixes."""
