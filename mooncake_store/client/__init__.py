"""Block access for any process (client.py) and for a worker (store.py)."""
