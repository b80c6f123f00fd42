"""The virtual clock: one queue of events, one random generator, and the processes that live on it.

Nothing here reads a clock. What is due at a time runs then, in the order of a random number drawn
when it was scheduled, so one seed is one order of everything. A process is what a fault hits: it
is killed (its threads end where they stand), frozen (what is due for it waits until it thaws), and
has a wall clock of its own, which may be wrong.

Not here: its threads (green.py), who talks to whom (network.py).
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz_serve.green import GreenThread

STARTED_S = 1_000.0  # of the monotonic clock of every process
WALL_S = 1.8e9
CLOCKS_S = {"a": 0.0, "b": 86_400.0}  # since each host was started
WAKE_S_MAX = 1e-4  # a thread that may go on does so within this time
TRACE_LINES_MAX = 200
STEPS_MAX = 400_000  # a seed has 10,000 to 40,000


class Violation(AssertionError):
    """Something that must hold does not; the message says what."""


class Killed(BaseException):
    """Thrown into the threads of a process that ends; nothing they do then has an effect."""


class Loop:
    """Virtual time. `current` is the process whose thread runs now; None: the simulation itself."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = STARTED_S
        self.steps = 0
        self.is_over = False
        self.failure = ""  # the first violation that somebody told
        self.threads: set[Any] = set()  # all that have begun and not ended
        self._queue: list[tuple[float, int, Process | None, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self.looks = itertools.count()  # at a stopwatch
        self.objects: set[bytes] = set()  # keys of what travelled once, as object of a request
        self.completed: set[bytes] = set()  # keys of which a directory took a copy as complete
        self.on_complete: Callable[[Any, bytes, int], None] = lambda *_: None  # node, key, slot
        self.seen: Counter[str] = Counter()  # what this seed went through
        self.lines: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self._digest = hashlib.blake2b(digest_size=16)
        self.is_shown = False

    def at(
        self,
        due_s: float,
        action: Callable[..., None],
        argument: Any = None,
        process: Process | None = None,
    ) -> None:
        """`action(argument)` then; of a process: when it lives and is not frozen."""
        heapq.heappush(self._queue, (due_s, next(self._order), process, action, argument))

    def soon(self, action: Callable[..., None], argument: Any, process: Process) -> None:
        """As the scheduler of a busy machine would."""
        due_s = self.now_s + self.rng.random() * WAKE_S_MAX
        heapq.heappush(self._queue, (due_s, next(self._order), process, action, argument))

    def run(self, until_s: float, after_step: Callable[[], None] = lambda: None) -> None:
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until_s:
            due_s, _, process, action, argument = pop(queue)
            if due_s > self.now_s:
                self.now_s = due_s
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise Violation(f"{STEPS_MAX} steps, and no end")
            if process is None:
                action(argument)
            elif not process.is_alive:
                continue
            elif process.is_frozen:
                process.backlog.append((action, argument))
                continue
            else:
                action(argument)
            if self.failure:
                raise Violation(self.failure)
            after_step()
        self.now_s = max(self.now_s, until_s)

    def fail(self, what: str) -> None:
        """From within product code, which may catch whatever is raised there."""
        self.failure = self.failure or what

    def note(self, line: str) -> None:
        """One line of the trace, which is the same whenever the seed is."""
        text = f"{self.now_s - STARTED_S:10.6f} {line}"
        self.lines.append(text)
        self._digest.update(text.encode())
        if self.is_shown:
            print(text, flush=True)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        """End every thread that is left; what they do in their last moment has no effect."""
        self.is_over = True
        for thread in sorted(self.threads, key=lambda thread: thread.number):
            thread.end()
        self.threads.clear()
        self._queue.clear()


class Process:
    """One operating-system process on a host."""

    def __init__(self, loop: Loop, name: str, host: str) -> None:
        self.loop, self.name, self.host = loop, name, host
        self.is_alive = True
        self.frozen_until_s = 0.0
        self.is_frozen = False
        self.skew_s = 0.0  # of its wall clock
        self.clock_s = CLOCKS_S.get(host, 0.0)  # of its monotonic one, against the world's
        self.has_stood_still = False  # ... its clocks, too: a VM that was paused
        self._frozen_at_s: float | None = None  # where its clocks stand still
        self.backlog: deque[tuple[Callable[..., None], Any]] = deque()
        self.threads: set[GreenThread] = set()
        self.on_end: list[Callable[[], None]] = []  # what the kernel does when it ends
        self.state: dict[str, Any] = {}  # objects of product code, for the judges

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def kill(self) -> None:
        """kill -9, or an end of its own."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.backlog.clear()
        for thread in sorted(self.threads, key=lambda thread: thread.number):
            thread.end()
        for action in self.on_end:
            action()
        self.state.clear()

    @property
    def now_s(self) -> float:
        return self.loop.now_s + self.clock_s

    def freeze(self, seconds: float, is_vm: bool = False) -> None:
        """SIGSTOP, or a VM that is paused, clocks and all: the world goes on."""
        if is_vm and self._frozen_at_s is None:
            self._frozen_at_s = self.loop.now_s
        self.is_frozen = True
        self.frozen_until_s = max(self.frozen_until_s, self.loop.now_s + seconds)
        self.loop.at(self.frozen_until_s, self._thaw)

    def _thaw(self, _: Any) -> None:
        if self.is_frozen and self.loop.now_s >= self.frozen_until_s:
            self.is_frozen = False
            if self._frozen_at_s is not None:
                self.clock_s -= self.loop.now_s - self._frozen_at_s
                self.has_stood_still, self._frozen_at_s = True, None
            waiting, self.backlog = self.backlog, deque()
            for action, argument in waiting:
                self.loop.at(self.loop.now_s, action, argument, self)
