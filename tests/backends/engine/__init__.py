"""Tests of the engines; checkpoints.py makes small random models of every supported family."""
