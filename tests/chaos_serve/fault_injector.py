"""What goes wrong, where and for how long: all of it follows from the seed; when, from the fleet.

A fault is one fault on one host (a cut between two hosts is of both). The next one comes
PAUSE_S after it began, and when at most one host is recovering. Kinds are dealt like cards: each
comes once before any comes again.

A host has recovered when all that ran on it at the start runs, is ready, and is known to the
directory, for every host that the fault was of.

Not here: the requests (streams.py), the verdict (verdict.py).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.harness.fleet import ServedFleet
from bench.harness.fleet.host import kind_of

PAUSE_S = 5.0
RECOVERING_MAX = 1
RECOVERED_S_MAX = 120.0
LOOK_S = 0.5
DARK_S = (0.5, 3.0)  # a host without power
FROZEN_S = (1.0, 8.0)  # the directory misses a worker after 5 s, a node after 3 s
NETWORK_S = (3.0, 10.0)
LOSS_PERCENT = (1.0, 10.0)
RATE_BYTES_PER_S = (1e6, 5e6)
KILLS_MAX, KILLS_WITHIN_S = 4, 70.0  # a launcher gives up on a child that ends more often
PROCESSES = ("prefill", "decode", "triton", "frontend", "node", "directory", "etcd")
KINDS = (
    *(f"kill {each}" for each in (*PROCESSES, "conductor")),
    "kill host",
    *(f"freeze {each}" for each in PROCESSES),
    "loss",
    "cut two",
    "cut off",
    "cut one way",
    "rate",
    "link down",
)
ENDS_STREAMS = ("kill frontend", "kill conductor", "kill host")  # of the frontend on that host
SILENCE = ("link down", "cut off")  # nobody hears then that something on that host has ended


@dataclass(slots=True)
class InjectedFault:
    kind: str
    hosts: tuple[str, ...]
    what: str  # for people
    began_s: float  # time.monotonic
    seconds: float = 0.0  # duration of the fault; 0: a kill
    undone_s: float | None = None
    recovered_s: float | None = None
    problem: str = ""  # why not yet

    @property
    def recovery_s(self) -> float | None:
        if self.recovered_s is None or self.undone_s is None:
            return None
        return self.recovered_s - self.undone_s

    def is_on(self, at_s: float) -> bool:
        """Had it begun by then, and was it not undone?"""
        return self.began_s <= at_s < (float("inf") if self.undone_s is None else self.undone_s)

    def covers(self, start_s: float, end_s: float) -> bool:
        """It was there, or the fleet recovered from it, at some time between."""
        until_s = float("inf") if self.recovered_s is None else self.recovered_s
        return self.began_s <= end_s and until_s >= start_s


@dataclass(slots=True)
class RecoveryWatch:
    """Looks in a thread of its own: a look may take seconds while parts are silent."""

    fleet: ServedFleet
    open: list[InjectedFault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="recovery-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join()

    def add(self, injected: InjectedFault) -> None:
        with self._lock:
            self.open.append(injected)

    @property
    def hosts(self) -> set[str]:
        """Those that are recovering, or still injected."""
        with self._lock:
            return {host for injected in self.open for host in injected.hosts}

    def problems(self) -> list[str]:
        with self._lock:
            return [f"{injected.what}: {injected.problem}" for injected in self.open]

    def _run(self) -> None:
        while not self._is_stopping.wait(LOOK_S):
            with self._lock:
                undone = [injected for injected in self.open if injected.undone_s is not None]
            found = {
                host: self.fleet.why_not_whole(host)
                for host in sorted({host for injected in undone for host in injected.hosts})
            }
            now_s = time.monotonic()
            with self._lock:
                for injected in undone:
                    injected.problem = next(
                        filter(None, (found[each] for each in injected.hosts)), ""
                    )
                    if not injected.problem:
                        injected.recovered_s = now_s
                        self.open.remove(injected)


class FaultInjector:
    """Faults from the thread that made the fleet: what a host runs ends with its thread."""

    def __init__(self, fleet: ServedFleet, seed: int, kinds: tuple[str, ...] = KINDS) -> None:
        self.fleet, self.chance = fleet, random.Random(seed)
        self.watch = RecoveryWatch(fleet)
        self.injected: list[InjectedFault] = []
        self._kinds = kinds
        self._deck: list[str] = []
        self._undo: list[tuple[InjectedFault, Callable[[], object]]] = []

    def run(self, seconds: float, say: Callable[[str], None]) -> None:
        """Until then, and until everybody has recovered or RECOVERED_S_MAX is over."""
        self.watch.start()
        try:
            end_s = time.monotonic() + seconds
            next_s = time.monotonic() + 1.0
            while (now_s := time.monotonic()) < end_s:
                self._make_undone(now_s)
                if now_s >= next_s and len(self.watch.hosts) <= RECOVERING_MAX:
                    self._inject(say)
                    next_s = now_s + PAUSE_S
                time.sleep(0.02)  # poll
            self._make_undone(float("inf"))
            give_up_s = time.monotonic() + RECOVERED_S_MAX
            while self.watch.hosts and time.monotonic() < give_up_s:
                time.sleep(0.1)  # poll
        finally:
            self._make_undone(float("inf"))
            self.watch.stop()

    def _make_undone(self, now_s: float) -> None:
        for injected, undo in list(self._undo):
            if injected.began_s + injected.seconds <= now_s:
                self._undo.remove((injected, undo))
                undo()
                injected.undone_s = time.monotonic()

    def _inject(self, say: Callable[[str], None]) -> None:
        """Once, unless nothing may be injected just now."""
        made = None
        for _ in self._kinds:  # the next card, when what this one is for does not run just now
            if (kind := self._next_kind()) is None:
                return
            verb, _, what = kind.partition(" ")
            is_process = verb in ("kill", "freeze") and what != "host"
            made = self._of_a_process(kind, verb, what) if is_process else self._of_a_host(kind)
            if made is not None:
                break
        if made is None:
            return
        injected, undo = made
        self.injected.append(injected)
        self.watch.add(injected)
        lasting = f" for {injected.seconds:.1f} s" if injected.seconds else ""
        say(f"{injected.what}{lasting}")
        if undo is None:
            injected.undone_s = injected.began_s
        else:
            self._undo.append((injected, undo))

    def _next_kind(self) -> str | None:
        """The first card that may be played now; None: none may."""
        for is_dealt in (False, True):
            if is_dealt:
                cards = list(self._kinds)
                self.chance.shuffle(cards)
                self._deck += cards
            for kind in self._deck:
                if not self._is_too_often(kind):
                    self._deck.remove(kind)
                    return kind
        return None

    def _is_too_often(self, kind: str) -> bool:
        since_s = time.monotonic() - KILLS_WITHIN_S
        recent = [each for each in self.injected if each.kind == kind and each.began_s > since_s]
        return kind.startswith("kill") and len(recent) >= KILLS_MAX

    def _of_a_process(
        self, kind: str, verb: str, what: str
    ) -> tuple[InjectedFault, Callable[[], object] | None] | None:
        """One process of that kind, wherever there is one; None when there is none."""
        targets = [
            (host, name)
            for host, each in self.fleet.hosts.items()
            for name, _ in each.named()
            if kind_of(name) == what
        ]
        if not targets:
            return None
        host, name = self.chance.choice(sorted(targets))
        injected = InjectedFault(kind, (host,), f"{verb} {name} of {host}", time.monotonic())
        if verb == "kill":
            self.fleet.hosts[host].kill(name)
            return injected, None
        injected.seconds = self.chance.uniform(*FROZEN_S)
        return injected, self.fleet.hosts[host].freeze(name).go_on

    def _of_a_host(self, kind: str) -> tuple[InjectedFault, Callable[[], object]]:
        network = self.fleet.namespaces
        first, second = self.chance.sample(sorted(self.fleet.hosts), 2)
        seconds = self.chance.uniform(*NETWORK_S)
        injected = InjectedFault(kind, (first,), f"{kind} {first}", time.monotonic(), seconds)
        if kind == "kill host":
            injected.seconds = self.chance.uniform(*DARK_S)
            self.fleet.hosts[first].kill_all()
            return injected, self.fleet.hosts[first].start
        if kind == "cut two":
            injected.hosts = (first, second)
            fault = network.cut(first, second)
        elif kind == "cut off":
            fault = network.cut(first)
        elif kind == "cut one way":
            injected.hosts = (first, second)
            fault = network.cut_one_way(first, second)
        elif kind == "loss":
            fault = network.loss(first, round(self.chance.uniform(*LOSS_PERCENT), 1))
        elif kind == "rate":
            fault = network.rate(first, round(self.chance.uniform(*RATE_BYTES_PER_S), -5))
        else:
            fault = network.link(first, up=False)
        injected.what = fault.name
        return injected, fault.undo
