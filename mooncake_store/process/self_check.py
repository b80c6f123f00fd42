"""A process that checks its own invariants while it serves, and ends when one is broken.

Off by default: it costs time under the lock of what is checked, and a process that ends takes its
requests along. `mooncake serve --self-check` switches it on, as the end-to-end tests and the leak
test do; there a broken invariant must not go on as a wrong number somewhere else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)
PERIOD_S = 1.0
EXIT_STATUS = 70
VARIABLE = "MOONCAKE_SELF_CHECK"  # in the environment: "1" switches it on


def is_switched_on() -> bool:
    return os.environ.get(VARIABLE) == "1"


class SelfCheck:
    """Call `run` often, from any one thread."""

    def __init__(
        self, check: Callable[[], None], is_on: bool, end: Callable[[int], object] = os._exit
    ) -> None:
        self._check = check
        self._is_on = is_on
        self._end = end
        self._due_s = float("-inf")
        self.passed = 0

    def run(self, now_s: float) -> None:
        """At most once every PERIOD_S. An AssertionError ends the process (see its log)."""
        if not self._is_on or now_s < self._due_s:
            return
        self._due_s = now_s + PERIOD_S
        try:
            self._check()
        except AssertionError:
            log.critical("a self-check failed after %d that passed", self.passed, exc_info=True)
            logging.shutdown()
            self._end(EXIT_STATUS)
            return
        self.passed += 1
