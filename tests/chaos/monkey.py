"""What is killed, stopped and started again, and when: all of it follows from the seed.

Several may be down at once. Whatever was stopped goes on within STOPPED_S_MAX, whatever was killed
starts again within DEAD_S_MAX; node s0 is stopped like the others, also for longer than the
directory waits for a node, but never killed. The client `late` stands still until its lease and the
quarantine of its slots are over, perhaps in the middle of a block, which it then goes on to write.

Not here: the processes (site.py), what must be true afterwards (verdict.py).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush

from tests.chaos.site import ChaosSite, Member

PAUSE_S = (0.2, 1.2)  # between two faults
STOPPED_S_MAX = 4.0  # more than the directory's node_ttl_s
DEAD_S_MAX = 3.0
LATE_S = (14.0, 18.0)  # a lease is DEADLINE_S + 5 s, then QUARANTINE_S
KILLED = ("directory", "s1", "s2", "writer")
STOPPED = ("directory", "s0", "s1", "s2", "near", "mapped", "writer", "late")


@dataclass(frozen=True)
class Stop:
    """When a process stood still; its own clock ran on."""

    name: str
    start_s: float
    end_s: float


class Monkey:
    def __init__(self, site: ChaosSite, seed: int) -> None:
        self.site, self.rng = site, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.stops: list[Stop] = []  # that are over
        self._stopped_s: dict[str, float] = {}  # since when, by name
        self._amends: list[tuple[float, int, str, Member]] = []  # heap: when, _, what, whom
        self._count = 0

    def run(self, seconds: float) -> None:
        """Until then; everything runs again afterwards."""
        end_s = time.monotonic() + seconds
        next_s = time.monotonic()
        while (now_s := time.monotonic()) < end_s:
            self._make_amends(now_s)
            if now_s >= next_s:
                self._inject_fault(now_s)
                next_s = now_s + self.rng.uniform(*PAUSE_S)
            time.sleep(0.02)  # poll
        self._make_amends(float("inf"))

    def _inject_fault(self, now_s: float) -> None:
        is_kill = self.rng.random() < 0.4
        member = self.site.members[self.rng.choice(KILLED if is_kill else STOPPED)]
        assert member.is_running or self._is_mending(member), (
            f"{member.name} ended by itself, status {member.process.poll()}:\n{member.tail()}"
        )
        if self._is_mending(member):
            return
        if is_kill:
            member.kill()
            self._later("start", member, now_s + self.rng.uniform(0.0, DEAD_S_MAX))
        else:
            member.stop()
            is_late = member.name == "late"
            seconds = self.rng.uniform(*(LATE_S if is_late else (0.1, STOPPED_S_MAX)))
            self._stopped_s[member.name] = now_s
            self._later("go on", member, now_s + seconds)
        self.done[f"{'kill' if is_kill else 'stop'} {member.name}"] += 1

    def _later(self, what: str, member: Member, when_s: float) -> None:
        self._count += 1
        heappush(self._amends, (when_s, self._count, what, member))

    def _is_mending(self, member: Member) -> bool:
        return any(each is member for *_, each in self._amends)

    def _make_amends(self, now_s: float) -> None:
        while self._amends and self._amends[0][0] <= now_s:
            _, _, what, member = heappop(self._amends)
            if what == "start":
                member.start()
            else:
                member.go_on()
                since_s = self._stopped_s.pop(member.name)
                self.stops.append(Stop(member.name, since_s, time.monotonic()))
