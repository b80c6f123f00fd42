"""Public load generators, unchanged, against a running server; their TTFT beside the server's."""
