"""A long random walk: threads, engine, writer and clients act in any order, the invariants hold.

And it would find out: five defects, planted in the tables, are each found.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.workers.lifecycle import decode, prefill, states
from backends.workers.lifecycle.events import Do, On
from backends.workers.lifecycle.states import JobPhase, JobState, Table

EVENTS = 100_000
DONE = {"load": On.LOADED, "compile": On.GRAMMAR_READY, "start": On.ENGINE_READY}
STEPS_MAX = 6  # steps of the engine for one job
ERROR = ValueError("broke")
MARK = "mark"
EARLY = "leases end before|released too early"
Stimulus = Callable[[], Any]


@dataclass
class World:
    """Everything around one job at a worker."""

    table: Table
    chance: random.Random
    state: JobState = field(default_factory=JobState)
    is_calm: bool = False  # from now on nothing fails, and nobody stops the job
    thread: str = ""  # what a thread does for the job; "": nothing
    has_asked: bool = False  # BetweenSteps is to be posted
    in_batch: bool = False  # holds a slot
    in_step: bool = False
    is_removed: bool = False
    engine: str = "idle"  # "working", "stopping", "left"
    is_begun: bool = False  # the engine was working when it was to stop
    writer: deque[str] = field(default_factory=deque)  # tasks of the job, and marks
    pages: int = 0  # sets of pages held; a preempted job may hold the old ones
    has_leases: bool = True
    calls: int = 0  # how often the call has ended
    is_connected: bool = False  # the engine has a process of its own
    refuses: bool = False  # the engine refuses the job after ENGINE_READY
    heard: Counter[tuple[JobPhase, On]] = field(default_factory=Counter)
    done: Counter[Do] = field(default_factory=Counter)

    def post(self, event: On, value: Any = None) -> None:
        self.heard[self.state.phase, event] += 1
        self.state, actions = states.step_of(self.table, self.state, event, value)
        for action in actions:
            self.done[action] += 1
            getattr(self, action.name.lower())()
        self.check()

    def check(self) -> None:
        state = self.state
        assert self.calls <= 1, "the call ended twice"
        assert state.is_busy == bool(self.thread), f"{state}: the thread is {self.thread!r}"
        assert state.awaited == self.writer.count(MARK), f"{state}: {self.writer}"
        assert self.in_batch <= (self.pages > 0), "it takes part in steps without pages"
        if state.phase is JobPhase.OVER:
            assert self.calls == 1 and not self.writer and not self.thread and not self.in_step
            assert not self.has_leases and not self.pages, "something is held for it"

    def nobody_uses_pages(self) -> bool:
        is_alone = not self.thread and not self.in_step and not self.writer
        return is_alone and self.engine in ("idle", "left")

    # --- actions of both roles

    def ask_turn(self) -> None:
        self.has_asked = True

    def load(self) -> None:
        assert self.pages and not self.is_removed and not self.thread
        self.thread = "load"

    def compile(self) -> None:
        assert self.thread == "load"
        self.thread = "compile"

    def start(self) -> None:
        assert self.thread in ("load", "compile")
        self.thread = "start"

    def join(self) -> None:
        assert not self.is_removed and not self.in_batch
        self.thread, self.in_batch, self.engine = "", True, "working"

    def remove(self) -> None:
        assert not self.is_removed and not self.in_step and not self.thread
        self.is_removed, self.in_batch = True, False

    def stop_engine(self) -> None:
        assert self.is_removed and self.engine in ("idle", "working"), self.engine
        self.is_begun, self.engine = self.engine == "working", "stopping"

    def await_writes(self) -> None:
        self.writer.append(MARK)

    def release_pages(self) -> None:
        assert self.pages <= 1 and self.nobody_uses_pages(), "pages are released too early"
        self.pages = 0

    def park_pages(self) -> None:
        assert not self.state.is_certain and not self.writer, "parked pages are still written"
        self.pages = 0

    def release_leases(self) -> None:
        assert self.has_leases, "leases are released twice"
        assert not self.writer, "leases end before the last write"
        self.has_leases = False

    def keep_leases(self) -> None:
        assert self.has_leases, "leases are given up twice"
        self.has_leases = False

    def fail(self) -> None:
        self.calls += 1

    # --- what may happen in both roles

    def stimuli(self) -> list[Stimulus]:
        found: list[Stimulus] = []
        if self.thread:
            found += [self.thread_ends] * 3
        if self.has_asked and not self.in_step:
            found += [self.turn] * 2
        if self.writer:
            found += [self.write] * 3
        if self.in_batch and not self.in_step and not self.refuses and self.can_compute():
            found += [self.step_begins] * 2
        if self.in_step:
            found += [self.step_ends] * 2
        if self.engine == "stopping" and not self.in_step:
            found += [self.copies, self.engine_leaves]
        if self.state.phase is JobPhase.QUEUED:
            found += [self.admit] * 3
        if self.refuses:
            found.append(self.engine_refuses)
        if not self.is_calm and self.chance.random() < 0.1:
            found += [lambda: self.post(On.STOPPED), lambda: self.post(On.FAILED, ERROR)]
            if self.state.phase in states.ENDING:
                found.append(lambda: self.post(On.CALL_LATE))
                found.append(lambda: self.post(*self.chance.choice(self.late_words())))
        return found

    def late_words(self) -> list[tuple[On, Any]]:
        """What an engine may say of a job that is leaving."""
        raise NotImplementedError

    def is_reading(self) -> bool:
        return not self.is_calm and self.chance.random() < 0.2

    def can_compute(self) -> bool:
        return True

    def engine_refuses(self) -> None:
        self.refuses = False
        self.post(On.LOAD_FAILED, ERROR)

    def admit(self) -> None:
        self.pages += 1
        self.post(On.PAGES_GIVEN)

    def turn(self) -> None:
        self.has_asked = False
        self.post(On.BETWEEN_STEPS, self.is_reading())

    def write(self) -> None:
        if self.writer.popleft() == MARK:
            self.post(On.WRITTEN)

    def step_begins(self) -> None:
        self.in_step = True

    def copies(self) -> None:
        """A copy of the engine that was under way ends, and a write follows."""
        if self.chance.random() < 0.3:
            self.writer.append("write")

    def engine_leaves(self) -> None:
        is_lost = self.is_begun and self.chance.random() < 0.1
        self.engine = "left"
        self.post(On.ENGINE_LEFT, not is_lost)

    def fails(self, share: float) -> bool:
        return not self.is_calm and self.chance.random() < share

    def thread_ends(self) -> None:
        raise NotImplementedError

    def step_ends(self) -> None:
        raise NotImplementedError


@dataclass
class Prefill(World):
    has_slots: bool = True
    steps: int = 0
    is_native: bool = False
    layers_left: int = 0  # layers of the prefix to read
    others_hold_block: bool = False
    sent: list[int] = field(default_factory=list)
    is_ready: bool = False  # the engine has computed the prompt
    is_handed: bool = False
    is_settled: bool = False
    marks_before_reply: int = 0  # marks up to that of ANSWERABLE

    def __post_init__(self) -> None:
        self.steps = self.chance.randint(1, STEPS_MAX)
        self.is_native = self.chance.random() < 0.3
        self.layers_left = self.chance.choice([0, 0, 3])
        self.is_connected = not self.layers_left
        hands_over = not self.is_native and self.chance.random() < 0.7
        self.state = JobState(needs_grammar=self.chance.random() < 0.3, keeps_leases=hands_over)

    def thread_ends(self) -> None:
        kind, self.thread = self.thread, ""
        if self.fails(0.1):
            self.post(On.LOAD_FAILED, ERROR)
        elif kind == "layer":
            is_here = not self.fails(0.3)
            self.layers_left -= is_here
            if is_here:
                self.writer.append("write")
            self.post(On.LAYER_READ, is_here)
        elif kind == "load" and not self.is_calm and self.chance.random() < 0.3:
            self.others_hold_block = True
            self.post(On.BLOCKED)
        else:
            self.thread = kind  # the next action says what the thread does next
            self.goes_on(DONE[kind])

    def goes_on(self, event: On) -> None:
        if self.state.phase is JobPhase.LEAVING:
            self.thread = ""
        self.post(event)
        self.refuses = event is On.ENGINE_READY and self.is_connected and self.fails(0.4)

    def stimuli(self) -> list[Stimulus]:
        found = super().stimuli()
        if self.others_hold_block:
            found.append(self.unblock)
        if self.state.phase is JobPhase.LEAVING and not self.pages:
            found.append(self.admit)  # another prompt's arrival may admit it before the turn
        may_load = self.in_batch and self.state.phase is JobPhase.COMPUTING and not self.thread
        if self.layers_left and may_load:
            found += [lambda: self.post(On.LAYER_DUE)] * 2
        if self.is_handed and not self.is_ready:
            found.append(self.compute_last)
        if self.state.phase in prefill.COMPUTED and not self.is_calm:  # an engine may say it again
            found.append(lambda: self.post(On.SAMPLED, 7))
            if self.is_native:
                found.append(lambda: self.post(On.ANSWERABLE))
            if self.is_ready:
                found.append(lambda: self.post(On.COMPUTED))
        return found

    def late_words(self) -> list[tuple[On, Any]]:
        return [(On.SAMPLED, 7), (On.ANSWERABLE, None), (On.COMPUTED, None), (On.UNBLOCKED, None)]

    def can_compute(self) -> bool:
        return not self.layers_left and not self.is_ready and not self.is_handed

    def write(self) -> None:
        is_mark = self.writer[0] == MARK
        super().write()
        self.marks_before_reply -= is_mark
        if (
            self.is_handed
            and self.marks_before_reply == 0
            and self.state.phase not in states.ENDING
        ):
            assert self.calls == 1, "the reply of a native hand-over waits for the store"

    def unblock(self) -> None:
        self.others_hold_block = False
        self.post(On.UNBLOCKED)

    def step_ends(self) -> None:
        self.in_step = False
        if self.fails(0.05):
            self.post(On.FAILED, ERROR)
            return
        self.steps -= 1
        self.writer.append("write")
        if self.steps > 0:
            return
        for _ in range(self.chance.choice([1, 1, 2])):  # an engine may say it again
            self.post(On.SAMPLED, 7)
        if self.is_native:
            self.is_handed = True
            self.post(On.ANSWERABLE)
            self.marks_before_reply = self.state.awaited
        else:
            self.is_ready = True
            self.post(On.COMPUTED)

    def compute_last(self) -> None:
        """The KV of a prompt that was handed over has come out of the engine."""
        if self.state.phase in states.LEFT:  # then the engine says no more of it
            self.is_handed = False
            return
        self.is_ready = True
        self.writer.append("write")
        self.post(On.COMPUTED)

    def read_layer(self) -> None:
        assert self.in_batch and not self.thread
        self.thread = "layer"

    def layer_loaded(self) -> None:
        assert not self.is_removed

    def stop_batch(self) -> None:
        assert self.in_batch and not self.in_step and not self.thread
        self.in_batch, self.engine = False, "idle"
        self.layers_left = self.chance.choice([0, 3])

    def give_up_slots(self) -> None:
        self.writer.append("write")

    def send_first(self) -> None:
        assert not self.sent, "the first token was sent twice"
        self.sent.append(7)

    def end_writes(self) -> None:
        assert self.state.error is not None

    def reply(self) -> None:
        assert self.sent == [7] and self.state.token_id == 7
        assert self.is_native or "write" not in self.writer, "it replies before its last write"
        self.calls += 1

    def free_slots(self) -> None:
        assert self.has_slots and self.nobody_uses_pages(), "slots are released too early"
        self.has_slots = False

    def settle(self) -> None:
        assert not self.is_settled and self.is_removed
        self.is_settled = True

    def check(self) -> None:
        super().check()
        if self.state.phase is JobPhase.OVER:
            assert self.is_settled and self.has_slots != self.state.is_certain


@dataclass
class Decode(World):
    tokens: int = 0
    tokens_max: int = 0
    sent_tokens: int = 0
    has_given: bool = True  # leases of blocks that a loader or the engine still reads
    is_saving: bool = False

    def __post_init__(self) -> None:
        self.tokens_max = self.chance.randint(1, STEPS_MAX)
        self.is_connected = self.chance.random() < 0.3
        self.state = JobState(needs_grammar=self.chance.random() < 0.3)

    def thread_ends(self) -> None:
        kind = self.thread
        if kind == "load" and not self.is_connected:
            self.post(On.KV_READ)
        if kind == "save":
            self.writer_saves()
        elif self.fails(0.1):
            self.thread = ""
            self.post(On.LOAD_FAILED, ERROR)
        else:
            if self.state.phase is JobPhase.LEAVING:
                self.thread = ""
            self.post(DONE[kind])
            self.refuses = kind == "start" and self.is_connected and self.fails(0.4)

    def writer_saves(self) -> None:
        """The writer saves in its thread, after what was queued before."""
        if self.writer:
            self.write()
            return
        self.thread, self.is_saving = "", False
        self.post(*(On.SAVE_FAILED, ERROR) if self.fails(0.2) else (On.SAVED, None))

    def stimuli(self) -> list[Stimulus]:
        found = super().stimuli()
        if self.is_connected and self.engine == "working" and self.has_given:
            found.append(lambda: self.post(On.KV_READ))
        if self.thread == "start" and self.is_connected and self.has_given:
            found.append(lambda: self.post(On.KV_READ))
        can_preempt = self.in_batch and not self.in_step and not self.is_connected
        if can_preempt and self.state.phase is JobPhase.COMPUTING and not self.is_calm:
            found.append(lambda: self.post(On.PREEMPTED))
        return found

    def late_words(self) -> list[tuple[On, Any]]:
        return [(On.DECODED, self.tokens), (On.FINISHED, self.tokens), (On.KV_READ, None)]

    def step_ends(self) -> None:
        self.in_step = False
        if self.fails(0.05):
            self.post(On.FAILED, ERROR)
            return
        if self.state.phase not in states.ENDING:
            self.tokens += 1
        if self.chance.random() < 0.3:
            self.writer.append("write")
        is_last = self.tokens == self.tokens_max
        if is_last or self.chance.random() < 0.7:
            for _ in range(self.chance.choice([1, 1, 2])):
                self.post(On.FINISHED if is_last else On.DECODED, self.tokens)

    def release_given(self) -> None:
        assert self.has_given, "the leases of handed-over blocks are released twice"
        self.has_given = False

    def send(self) -> None:
        assert self.tokens > self.sent_tokens, "a token was sent twice"
        self.sent_tokens = self.tokens

    def reply(self) -> None:
        assert self.tokens == self.tokens_max
        self.sent_tokens = self.tokens
        self.calls += 1

    def take_pages(self) -> None:
        assert self.in_batch and not self.in_step
        self.in_batch, self.engine, self.has_given = False, "idle", True

    def save(self) -> None:
        assert not self.in_batch, "a preempted job keeps a slot"
        self.thread, self.is_saving = "save", True

    def end_save(self) -> None:
        assert not self.is_saving and not self.thread
        self.pages -= 1

    def check(self) -> None:
        super().check()
        assert self.sent_tokens <= self.tokens


KINDS: list[tuple[type[World], Table]] = [(Prefill, prefill.TABLE), (Decode, decode.TABLE)]


def live(world: World) -> int:
    """One job from its arrival to its end. Returns the number of events."""
    for turn in range(10_000):
        world.is_calm = turn > 80
        todo = world.stimuli()
        if todo:
            world.chance.choice(todo)()
        elif world.is_calm:
            break
    assert world.state.phase is JobPhase.OVER, f"it waits for ever: {world.state}"
    return sum(world.heard.values())


def walk(kind: type[World], table: Table, seed: int, events: int) -> Counter[tuple[JobPhase, On]]:
    heard: Counter[tuple[JobPhase, On]] = Counter()
    number = 0
    while heard.total() < events:
        world = kind(table, random.Random(seed + number))
        try:
            live(world)
        except AssertionError as error:
            raise AssertionError(f"job {number}: {error}") from error
        heard += world.heard
        number += 1
    return heard


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "table"), KINDS)
def test_every_order_of_events_ends_a_job_once_and_releases_what_it_held(
    kind: type[World], table: Table, seed: int
) -> None:
    heard = walk(kind, table, seed, EVENTS)
    assert heard.keys() == table.keys(), "a cell that no order of events reaches"


def _freed_early(state: JobState, value: Any) -> states.Result:
    return states.flushed(state._replace(awaited=1, is_certain=True), value)


def _prompt_freed_early(state: JobState, value: Any) -> states.Result:
    return prefill._flushed(state._replace(awaited=1, is_certain=True), value)


def _released_twice(state: JobState, value: Any) -> states.Result:
    state, actions = states.call_late(state, value)
    return state, [Do.RELEASE_LEASES, *actions]


def _sampled_again(state: JobState, value: Any) -> states.Result:
    return state._replace(token_id=value), [Do.SEND_FIRST]


def _sent_again(state: JobState, value: Any) -> states.Result:
    state, actions = decode._decoded(state, value)
    return state, actions or [Do.SEND]


def _no_wake_up(state: JobState, value: Any) -> states.Result:
    state, actions = states.thread_failed(state, value)
    return state, [action for action in actions if action is not Do.ASK_TURN]


def _slot_kept(state: JobState, value: Any) -> states.Result:
    state, actions = decode._preempted(state, value)
    return state, [action for action in actions if action is not Do.TAKE_PAGES]


@pytest.mark.parametrize(
    ("kind", "table", "cell", "defect", "words"),
    [
        (Prefill, prefill.TABLE, (JobPhase.QUITTING, On.ENGINE_LEFT), _prompt_freed_early, EARLY),
        (Decode, decode.TABLE, (JobPhase.QUITTING, On.ENGINE_LEFT), _freed_early, EARLY),
        (Prefill, prefill.TABLE, (JobPhase.FLUSHING, On.CALL_LATE), _released_twice, "leases"),
        (Prefill, prefill.TABLE, (JobPhase.COMPUTING, On.SAMPLED), _sampled_again, "sent twice"),
        (Decode, decode.TABLE, (JobPhase.COMPUTING, On.DECODED), _sent_again, "sent twice"),
        (Prefill, prefill.TABLE, (JobPhase.LOADING, On.LOAD_FAILED), _no_wake_up, "waits for ever"),
        (Decode, decode.TABLE, (JobPhase.LOADING, On.LOAD_FAILED), _no_wake_up, "waits for ever"),
        (Decode, decode.TABLE, (JobPhase.COMPUTING, On.PREEMPTED), _slot_kept, "keeps a slot"),
    ],
    ids=[
        "a page of a prompt freed before its last write",
        "a page of an answer freed before its last write",
        "a lease released twice",
        "the first token sent twice",
        "a token sent twice",
        "no wake-up after a failed load of a prompt",
        "no wake-up after a failed load of an answer",
        "a preempted job that keeps a slot",
    ],
)
def test_a_planted_defect_is_found(
    kind: type[World], table: Table, cell: tuple[JobPhase, On], defect: Any, words: str, seed: int
) -> None:
    assert cell in table
    with pytest.raises(AssertionError, match=words):
        walk(kind, {**table, cell: defect}, seed, EVENTS)
