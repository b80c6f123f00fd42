"""A worker's process on the virtual clock: frozen, nothing happens in it.

A frozen process (SIGSTOP, a machine without memory) is not a dead one: its connections stay open,
what others send it waits, and when it goes on it goes on with all of it, as if no time had passed.
So whatever happens in a process passes through here: its own timers, calls and messages to it, and
the ends of transfers that it waits for. One-sided transfers go on meanwhile, as with RDMA.

Not here: what a worker does (cluster/), who freezes it (followed_fleet.py).
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
        """Something comes to the process: now, or when it goes on."""
        if self.is_frozen:
            self._waiting.append((action, arguments))
        else:
            action(*arguments)

    def thaw(self) -> None:
        """It goes on, with what waited, in order."""
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for action, arguments in waiting:
            self.at(self.now_s, action, *arguments)


class ProcessNetwork(Network):
    """The cluster's network; the end of a transfer is something that comes to the process."""

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
