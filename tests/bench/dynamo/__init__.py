"""Dynamo's replay engine: its rules one by one, the gate, and the conductor in it."""
