"""`mooncake serve`: processes, environment, the mirrored repository."""
