"""End to end: the real Triton, storage nodes, NIXL and workers; nothing is stood in for."""
