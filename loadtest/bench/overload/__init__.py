"""More than fits, on the real server: what admission saves, and what it costs the others.

`python -m loadtest.bench.overload` runs it; __main__.py says what it measures.
"""
