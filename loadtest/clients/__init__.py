"""A notice for one release: this folder is now bench/clients/ of a clone."""

import sys

sys.exit("loadtest.clients has moved: run `python -m bench.clients`, in a clone of the repository")
