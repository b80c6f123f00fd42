"""A worker's process on the virtual clock, which can be frozen.

A frozen process (SIGSTOP, a machine without memory) is not a dead one. Its connections stay open
and messages to it wait. When it continues it handles all of them, as if no time had passed. So all
events in a process pass through here: its timers, calls and messages to it, and the ends of
transfers that it waits for. One-sided transfers continue while it is frozen, as with RDMA.

Not here: a worker's work (cluster/), freezing (followed_fleet.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loadtest.simulator.cluster.clock import VirtualClock
from loadtest.simulator.cluster.network import Network
from loadtest.simulator.cluster.site import SimulatedSite


class ProcessClock(VirtualClock):
    """The cluster's clock, as one process sees it."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.is_frozen = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return self._clock.now_s

    def at(self, due_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._clock.at(due_s, self.reach, action, *arguments)

    def reach(self, action: Callable[..., None], *arguments: Any) -> None:
        """Deliver an event to the process: now, or after the freeze."""
        if self.is_frozen:
            self._waiting.append((action, arguments))
        else:
            action(*arguments)

    def thaw(self) -> None:
        """Continue, and handle the waiting events in order."""
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for action, arguments in waiting:
            self.at(self.now_s, action, *arguments)


class ProcessNetwork(Network):
    """The cluster's network; the end of a transfer is an event of the process."""

    def __init__(self, network: Network, process: ProcessClock) -> None:
        self._network, self._process = network, process
        self.latency_s = network.latency_s

    def send(
        self,
        sender: str,
        receiver: str,
        size_bytes: int,
        done: Callable[[], None],
        paced_s: float = 0.0,
    ) -> None:
        def ended() -> None:
            self._process.reach(done)

        self._network.send(sender, receiver, size_bytes, ended, paced_s)


def site_of_process(site: SimulatedSite) -> SimulatedSite:
    """The site, as a process of its own sees it."""
    process = ProcessClock(site.clock)
    return replace(site, clock=process, network=ProcessNetwork(site.network, process))
