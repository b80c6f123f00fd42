"""`python -m loadtest.replay` is `mooncake replay`."""

from __future__ import annotations

import sys

from backends.cli import main

if __name__ == "__main__":
    main(["replay", *sys.argv[1:]])
