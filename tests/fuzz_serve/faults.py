"""What befalls the deployment, by seed: deaths, freezes, cuts, slow and late messages, bits that
fall over, clocks that are wrong, memory that is full.

Each fault is one draw; `Faults.kinds` says which kinds a seed has, so that a failing one can be
tried again with fewer. Faults end on `heal`.

Not here: what must hold in spite of them (judge.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz_serve import etcd
from tests.fuzz_serve.loop import Loop, Process
from tests.fuzz_serve.memory import Memories
from tests.fuzz_serve.network import Network
from tests.fuzz_serve.site import Deployment

KINDS = (
    "kill",
    "freeze",
    "pause",
    "cut",
    "slow",
    "late",
    "bits",
    "wire",
    "clock",
    "stub",
    "leave",
    "reload",
    "stall",
)
BUSY_S_MAX = 2.0  # of a request
CUT_S_MAX, FREEZE_S_MAX = 8.0, 9.0
SLOW_S_MIN = 4.0  # of a transfer: another directory may lead before it ends


class Faults:
    def __init__(self, world: Loop, site: Deployment, network: Network, memories: Memories) -> None:
        self.world, self.site, self.network, self.memories = world, site, network, memories
        self.kinds = {kind for kind in KINDS if world.rng.random() < 0.4}
        self.is_over = False

    def begin(self, from_s: float, until_s: float, asked_s: list[float], count: int) -> None:
        """Most faults come just when somebody has asked something."""
        rng, world = self.world.rng, self.world
        if "slow" in self.kinds:
            self.network.slow_share = 0.02
        if "late" in self.kinds:
            self.memories.late_share = 0.05
        if "wire" in self.kinds:
            self.memories.bad_share = 0.02
        if "stall" in self.kinds:
            self.memories.stall_share = 0.12
            self.memories.on_stall = self._stalled
        acts: dict[str, Callable[[], None]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "cut": self._cut,
            "bits": self.memories.flip,
            "clock": self._clock,
            "stub": self._stub,
            "pause": self._pause,
            "leave": self._leave,
            "reload": self._reload,
        }
        chosen = [acts[kind] for kind in KINDS if kind in self.kinds and kind in acts]
        for _ in range(count if chosen else 0):
            act = rng.choice(chosen)
            at_s = from_s + (until_s - from_s) * rng.random()
            if rng.random() < 0.7:
                at_s = min(rng.choice(asked_s) + rng.random() ** 2 * BUSY_S_MAX, until_s)
            world.at(at_s, self._act, act)

    def _act(self, act: Callable[[], Any]) -> None:
        if not self.is_over:
            self.world.seen[act.__name__.strip("_")] += 1
            act()

    def _somebody(self) -> Process:
        """Frontends more rarely: with one its clients go."""
        rng, there = self.world.rng, self.site.alive()
        chosen = rng.choice(there)
        if chosen.name.startswith("frontend") and rng.random() < 0.6:
            chosen = rng.choice(there)
        return chosen

    def _kill(self) -> None:
        process = self._somebody()
        self.world.note(f"{process.name} is killed")
        process.kill()

    def _stub(self) -> None:
        """The process of a worker dies, its Triton lives: calls to it hang."""
        workers = [*self.site.alive("prefill"), *self.site.alive("decode")]
        if workers:
            process = self.world.rng.choice(workers)
            if "triton" in process.state:
                process.state["triton"].is_reset = False
            self.world.note(f"the stub of {process.name} is killed")
            process.kill()

    def _leave(self) -> None:
        process = self._somebody()
        self.world.note(f"{process.name} is asked to end")
        self.site.leave(process)

    def _reload(self) -> None:
        workers = [*self.site.alive("prefill"), *self.site.alive("decode")]
        there = [process for process in workers if "worker" in process.state]
        if there:
            process = self.world.rng.choice(there)
            self.world.note(f"{process.name} is reloaded")
            self.site.reload(process)

    def _stalled(self, seconds: float) -> None:
        """Often the directory that granted the slots of a slow transfer dies meanwhile."""
        leading = [process for process in self.site.alive("directory") if "server" in process.state]
        if seconds > SLOW_S_MIN and leading and self.world.rng.random() < 0.7:
            self.world.note(f"a transfer stands still for {seconds:.3f} s")
            at_s = self.world.now_s + self.world.rng.random() ** 2
            self.world.at(at_s, lambda _: self._kill_one(leading[0]))

    def _kill_one(self, process: Process) -> None:
        if not self.is_over and process.is_alive:
            self.world.note(f"{process.name} is killed")
            process.kill()

    def _pause(self) -> None:
        """A VM: its clocks stand still with it, all that it has."""
        seconds = FREEZE_S_MAX * self.world.rng.random()
        host = self.world.rng.choice(self.site.shape.hosts)
        self.world.note(f"host {host} is paused for {seconds:.3f} s")
        for process in self.site.alive():
            if process.host == host:
                process.freeze(seconds, is_vm=True)

    def _freeze(self) -> None:
        process = self._somebody()
        seconds = self.world.rng.choice((0.5, 2.0, 4.0, FREEZE_S_MAX)) * self.world.rng.random()
        self.world.note(f"{process.name} is frozen for {seconds:.3f} s")
        process.freeze(seconds)

    def _cut(self) -> None:
        rng = self.world.rng
        hosts = [*self.site.shape.hosts, etcd.HOST]
        one, other = rng.sample(hosts, 2)
        seconds = CUT_S_MAX * rng.random() ** 2
        both = rng.random() < 0.6
        self.world.note(f"{one} {'and' if both else 'to'} {other} cut for {seconds:.3f} s")
        self.network.cut(one, other, seconds)
        if both:
            self.network.cut(other, one, seconds)

    def _clock(self) -> None:
        """A wall clock is set: back or forth by up to an hour."""
        rng = self.world.rng
        process = rng.choice(self.site.alive())
        process.skew_s += rng.uniform(-3600.0, 3600.0)
        self.world.note(f"the clock of {process.name} is set")

    def heal(self) -> None:
        """From now on nothing fails any more."""
        self.is_over = True
        self.network.heal()
        self.memories.late_share = self.memories.bad_share = self.memories.stall_share = 0.0
        for process in self.site.alive():
            if process.is_frozen:
                process.frozen_until_s = self.world.now_s
                process._thaw(None)
