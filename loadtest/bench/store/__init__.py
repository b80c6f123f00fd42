"""`python -m loadtest.bench.store`: the store's bytes per second beside memcpy, NIXL and peers."""
