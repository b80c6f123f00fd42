"""Memory: segments and their headers, memory of the caller's, checksums."""
