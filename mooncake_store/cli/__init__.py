"""`mooncake store`: run a store, inspect it, put and get blocks, drain nodes, check blocks."""
