"""What do benchmarks start and stop? Prefill processes, fleets in namespaces, random
checkpoints.
"""
