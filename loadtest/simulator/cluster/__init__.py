"""A simulated cluster for the real conductor, directory, eviction and batching."""
