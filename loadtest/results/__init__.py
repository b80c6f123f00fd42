"""What is the result of a run? Records of its requests, their numbers, and a run as a file."""
