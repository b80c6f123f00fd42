"""NVIDIA Dynamo's replay engine, simulated independently, alone and under the real Conductor.

Dynamo's own router and queues run in its own replay (peer.py). This package has the rules of its
engine, so that another scheduler can be tried on the same machine. Numbers: bench/RESULTS.md.
"""
