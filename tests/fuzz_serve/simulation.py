"""One seed: a deployment, clients and faults for a while; then all is healed and comes to rest.

Not here: what must hold (judge.py), what befalls whom (faults.py).
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz_serve import judge, stage
from tests.fuzz_serve.clients import Clients
from tests.fuzz_serve.faults import Faults
from tests.fuzz_serve.loop import STARTED_S, Loop, Violation
from tests.fuzz_serve.network import Network
from tests.fuzz_serve.site import Deployment, Shape
from tests.fuzz_serve.sockets import Exchange
from tests.fuzz_serve.users import Users

READY_S = 5.0  # an election, nodes, workers
BUSY_S = 14.0  # of clients and faults
# A call of which nothing is heard is given up after 30 s; then a request may go on for
# request_s_max; leases and quarantines end. Nearly all seeds come to rest much sooner.
REST_S = 75.0
DEADLINE_S = 100.0  # of every request
REST_LOOK_S = 3.0
CHECK_STEPS = 1_000  # between two looks at every invariant


@dataclass(frozen=True)
class Outcome:
    """What came of one seed; `problem` is empty when all held."""

    seed: int
    problem: str
    steps: int
    digest: str
    kinds: tuple[str, ...]
    ends: tuple[str, ...]
    seen: Counter[str]  # what it went through
    lines: list[str] = field(default_factory=list)


class Simulation:
    """Only within `stage.on_stage`."""

    def __init__(
        self, seed: int, without: frozenset[str] = frozenset(), checks_all: bool = False
    ) -> None:
        self.seed = seed
        self.world = world = Loop(seed)
        self.network = Network(world)
        self.memories, self.etcd = stage.begin(world, Exchange(self.network))
        rng = world.rng
        units = {f"s{host}": rng.choice((16, 20, 28, 40)) for host in "ab"}
        shape = Shape(
            units,
            step_s=rng.choice((0.004, 0.03, 0.2)),
            token_s=rng.choice((0.0005, 0.01)),
            policy=rng.choice(("adaptive", "kvcache_centric", "cache_aware")),
            queue_requests_max=rng.choice((2, 8)),
        )
        self.site = Deployment(world, self.network, shape)
        self.clients = Clients(world, self.site)
        self.users = Users(world, self.site)
        self.faults = Faults(world, self.site, self.network, self.memories)
        self.faults.kinds -= without
        if not self.faults.kinds & judge.DEADLY:
            shape.attempts_max = 1  # nothing may count
        self._checks_every = 1 if checks_all else CHECK_STEPS

    def run(self) -> Outcome:
        problem = ""
        try:
            self._run()
        except Exception as error:  # Catch all: any exception is a finding of this seed
            problem = _described(error)
            world = self.world
            world.note(f"VIOLATION at step {world.steps}: {problem.splitlines()[0]}")
        ends = tuple(client.end for client in self.clients.all)
        outcome = Outcome(
            self.seed,
            problem,
            self.world.steps,
            self.world.digest,
            tuple(sorted(self.faults.kinds)),
            ends,
            self.world.seen,
            list(self.world.lines) if problem else [],
        )
        self.world.close()
        return outcome

    def _run(self) -> None:
        world, rng = self.world, self.world.rng
        begin_s = STARTED_S + READY_S
        asked_s = [begin_s + rng.random() * BUSY_S for _ in range(rng.choice((5, 9, 14)))]
        for at_s in asked_s:
            for _ in range(rng.choice((1, 1, 1, 3))):  # a burst of one prefix, sometimes
                world.at(at_s, lambda _: self.clients.ask())
        self.users.begin(begin_s, rng.choice((0, 0, 2, 3)))
        self.faults.begin(begin_s, begin_s + BUSY_S, asked_s, rng.randrange(3, 12))
        world.run(begin_s + BUSY_S, self._after_step)
        self.faults.heal()
        self.users.end()
        world.note("healed")
        rest_s = world.now_s + REST_S
        while world.now_s < rest_s:
            world.run(world.now_s + REST_LOOK_S, self._after_step)
            if self._is_at_rest():
                break
        judge.check_rest(self.site, self.clients, self.users, DEADLINE_S)
        judge.check_losses(self.clients.all, self.faults.kinds)
        is_damaged = bool({"bits", "wire"} & self.faults.kinds)
        judge.check_memory(self.site, self.memories, self.clients, self.users, is_damaged)

    def _after_step(self) -> None:
        if self.world.steps % self._checks_every == 0:
            judge.check_all(self.site)
            judge.check_one_leader(self.site)
            judge.check_index(self.site, must_be_current=False)

    def _is_at_rest(self) -> bool:
        """Nothing is left to wait for, as far as can be seen cheaply."""
        try:
            judge.check_rest(self.site, self.clients, self.users, DEADLINE_S)
        except (AssertionError, KeyError):
            return False
        return True


def _described(error: BaseException) -> str:
    """Its words, and of an error that nobody raised on purpose where it came from."""
    if isinstance(error, Violation):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = "".join(f"\n  at {f.filename.rpartition('/')[2]}:{f.lineno} {f.line}" for f in frames)
    return f"{type(error).__name__}: {error}{where}"
