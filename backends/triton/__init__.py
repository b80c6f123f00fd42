"""Access to Triton's Python backend API, and the Triton model of the workers."""
