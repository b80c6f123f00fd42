"""`python -m loadtest.simulator` is `mooncake simulate`."""

from __future__ import annotations

import sys

from backends.cli import main

if __name__ == "__main__":
    main(["simulate", *sys.argv[1:]])
