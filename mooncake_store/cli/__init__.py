"""`mooncake store`: run a store, look into it, put and get, drain and check."""
