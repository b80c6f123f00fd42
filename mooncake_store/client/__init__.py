"""Blocks from and to wherever they are: for any process (client.py), for a worker (store.py)."""
