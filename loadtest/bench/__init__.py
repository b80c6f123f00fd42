"""A notice for one release: this folder is now bench/ of a clone."""

import sys

sys.exit("loadtest.bench has moved: run `python -m bench.NAME`, in a clone of the repository")
