"""A simulated cluster: virtual time, workers, network. What decides in it is the real code."""
