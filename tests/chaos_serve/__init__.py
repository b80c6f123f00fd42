"""A whole fleet under attack: three hosts in namespaces, streams, faults, and a verdict.

    python -m tests.chaos_serve --seconds 600 --seed 1

`make chaos-serve SECONDS=600` does the same. fault_injector.py: what goes wrong and when;
streams.py: the requests; verdict.py: what must be true of all that was seen.
"""
