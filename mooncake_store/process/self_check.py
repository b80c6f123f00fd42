"""Self-check: a process checks its invariants while it serves, and exits on a violation.

The self-check is off by default, because it takes time under the lock of the checked state, and an
exit ends all requests of the process. `mooncake serve --self-check` enables it. The end-to-end
tests and the leak test use this option.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)
PERIOD_S = 1.0  # seconds from one check to the next
EXIT_STATUS = 70  # exit status of a process whose check failed
VARIABLE = "MOONCAKE_SELF_CHECK"  # environment variable: "1" enables the check


def is_switched_on() -> bool:
    return os.environ.get(VARIABLE) == "1"


class SelfCheck:
    """Calls `check` once per PERIOD_S, if `run` is called often. Only one thread may use it."""

    def __init__(
        self, check: Callable[[], None], is_on: bool, end: Callable[[int], object] = os._exit
    ) -> None:
        self._check = check
        self._is_on = is_on
        self._end = end
        self._due_s = float("-inf")
        self.passed = 0

    def run(self, now_s: float) -> None:
        """Check if PERIOD_S has passed. An AssertionError is logged and ends the process."""
        if not self._is_on or now_s < self._due_s:
            return
        self._due_s = now_s + PERIOD_S
        try:
            self._check()
        except AssertionError:
            log.critical("a self-check failed after %d checks passed", self.passed, exc_info=True)
            logging.shutdown()
            self._end(EXIT_STATUS)
            return
        self.passed += 1
