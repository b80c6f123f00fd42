"""Memory: segments and their headers, callers' buffers, checksums."""
