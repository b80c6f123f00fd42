"""Transports between a node's memory and local memory: mapped, NIXL, plain TCP; and their
choice."""
