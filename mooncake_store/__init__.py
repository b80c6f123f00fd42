"""The KV store: a directory of blocks, storage nodes that hold their bytes, and transports."""
