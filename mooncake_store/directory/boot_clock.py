"""The clock by which leads and grants are timed: of a machine, and it goes on while that sleeps.

What it says has no meaning on another machine. Here, so that who grants in time (election.py) and
who writes in time (client.py, which needs no etcd) go by the same one.
"""

from __future__ import annotations

import time


def boot_s() -> float:
    """Seconds since this machine was started, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
