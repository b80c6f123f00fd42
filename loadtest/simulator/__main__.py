"""`python -m loadtest.simulator` is `mooncake simulate`."""

from __future__ import annotations

import sys

from loadtest.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
