"""What came of a run? Records of its requests, what their numbers mean, and a run as a file."""
