"""The prefix index, block keys and decisions against a clock, beside NVIDIA Dynamo's index.

`python -m loadtest.bench.index` runs it; __main__.py says what it measures.
"""
