"""`mooncake serve`: child processes, environment checks, mirrored model repository."""
