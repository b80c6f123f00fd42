"""The end of a worker whose engine is of no use any more; the launcher starts it again.

Triton's stub has no other way to say that. Not here: why (engine/trtllm/health.py, step_watch.py),
starting again (launch.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
STEPS_S_MAX = 10.0  # what is broken may hang as well
LAST_WORDS_S = 1.0  # for answers that are on their way to clients


def end_process(*steps: Callable[[], None]) -> None:
    """Leave the cluster, end what can be ended (these `steps`), let answers out, and end."""
    is_done = threading.Event()

    def take_steps() -> None:
        for step in steps:
            try:
                step()
            except Exception:  # edge: it is broken, and it will end
                log.exception("leaving")
        is_done.set()

    def end() -> None:
        is_done.wait(STEPS_S_MAX)
        threading.Event().wait(LAST_WORDS_S)
        os._exit(1)

    threading.Thread(target=end, name="end", daemon=True).start()
    threading.Thread(target=take_steps, name="last-steps", daemon=True).start()
