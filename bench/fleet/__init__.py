"""What does it cost to be several hosts? `python -m bench.fleet`."""
