"""One benchmark per file; each is `python -m loadtest.bench.NAME` and ends with one JSON line."""
