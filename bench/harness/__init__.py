"""What benchmarks start and stop: prefill processes, fleets in namespaces, random checkpoints."""
