"""Clock for the deadlines of leaders and of grants: CLOCK_BOOTTIME, which runs during sleep.

Its values have no meaning on another machine. The module is separate because election.py and
client.py must use the same clock, and client.py must not import etcd.
"""

from __future__ import annotations

import time


def boot_s() -> float:
    """Seconds since this machine booted, including sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
