"""The network between hosts: how long a message takes, and which pairs of hosts are cut off.

A connection keeps its order, as TCP does; two connections know nothing of each other. What is sent
into a cut waits, as TCP sends it again, and comes when the cut is over; or the connection has
broken meanwhile, and all that was under way on it is lost.

Not here: what a socket is (sockets.py), bytes that move one-sided (memory.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz_serve.loop import Loop, Process

NEAR_S = (2e-5, 2e-4)  # within a host
FAR_S = (2e-4, 2e-3)
SLOW_S_MAX = 1.5  # of a message that is late


class Network:
    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.cuts: dict[tuple[str, str], float] = {}  # (from, to) -> until when
        self.slow_share = 0.0  # of messages
        self.break_share = 0.3  # of the connections that a cut meets
        self.loses = True  # False: heal, and nothing more is lost

    def cut(self, source: str, target: str, seconds: float) -> None:
        until_s = self.loop.now_s + seconds
        self.cuts[source, target] = max(until_s, self.cuts.get((source, target), 0.0))

    def heal(self) -> None:
        self.cuts.clear()
        self.slow_share = 0.0
        self.break_share = 0.0

    def is_cut(self, source: str, target: str) -> bool:
        return self.cuts.get((source, target), 0.0) > self.loop.now_s

    def delay_s(self, source: str, target: str) -> float:
        rng = self.loop.rng
        low, high = NEAR_S if source == target else FAR_S
        seconds = low + (high - low) * rng.random()
        if self.slow_share and source != target and rng.random() < self.slow_share:
            seconds += rng.random() * SLOW_S_MAX
        return seconds

    def arrival_s(self, source: str, target: str) -> float | None:
        """When what is sent now arrives; None: its connection breaks."""
        sent_s = self.loop.now_s
        if (until_s := self.cuts.get((source, target), 0.0)) > sent_s:
            if self.loop.rng.random() < self.break_share:
                return None
            sent_s = until_s
        return sent_s + self.delay_s(source, target)


class Wire:
    """One direction of a connection: in order, or broken."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network, self._source, self._target = network, source, target
        self._last_s = 0.0
        self.is_broken = False

    def send(self, deliver: Callable[[Any], None], message: Any) -> bool:
        """False: the connection broke, this message and those behind it are lost."""
        if self.is_broken:
            return False
        due_s = self._network.arrival_s(self._source, self._target)
        if due_s is None:
            self.is_broken = True
            return False
        self._last_s = due_s = max(due_s, self._last_s + 1e-9)
        self._network.loop.at(due_s, self._deliver, (deliver, message))
        return True

    def _deliver(self, what: tuple[Callable[[Any], None], Any]) -> None:
        deliver, message = what
        if not self.is_broken:
            deliver(message)


def hosts_of(processes: list[Process]) -> list[str]:
    return sorted({process.host for process in processes})
