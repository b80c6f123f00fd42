"""A long random walk: workers, messages and clients do what they like, the invariants hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from backends.errors import (
    Cancelled,
    KvMissing,
    Overloaded,
    ServingError,
    StoreLost,
    WorkerGone,
    WorkerRefused,
    WorkerUnavailable,
    WorkerUnreached,
)
from backends.frontend.lifecycle.attempts import RULES, Attempts
from backends.frontend.lifecycle.events import (
    CallDecode,
    CallFailed,
    CallPrefill,
    Decide,
    DecodeReplied,
    End,
    EndAttempt,
    Failed,
    FirstText,
    FirstTokenArrived,
    LifecycleAction,
    LifecycleEvent,
    NoteLoss,
    NotePrefill,
    NotRouted,
    Pause,
    PauseOver,
    PrefillReplied,
    ReleaseKv,
    Routed,
    Send,
    StopWorkers,
    TimePassed,
    TokensArrived,
    Understood,
    Unwanted,
    WorkerId,
    WorkerLost,
    WorkerSilent,
)
from backends.frontend.lifecycle.machine import TABLE, Phase, State, step
from backends.text.text_stream import OutputDelta

EVENTS = 100_000
TOKENS_MAX = 8
PREFILLS = [(f"prefill_{n}", "p") for n in range(2)]
DECODES = [(f"decode_{n}", "d") for n in range(2)]
Stimulus = Callable[[], LifecycleEvent | None]


@dataclass
class Call:
    """A call under way to a worker, and the messages that this worker sends meanwhile."""

    attempt: int
    base: int  # tokens that the client had when the attempt was routed
    is_decode: bool
    decoded: int = 0  # tokens that messages have brought or lost
    held: bool = False  # prefill's token was held back


@dataclass
class Told:
    """What the machine asked for on behalf of one attempt."""

    was_called: bool = False
    calls: int = 0  # under way
    ended: int = 0
    released: int = 0
    is_complete: bool = False


def text(start: int, end: int) -> OutputDelta:
    return OutputDelta(tuple(range(start, end)), "".join(f"<{n}>" for n in range(start, end)))


@dataclass
class World:
    """Everything around one request. The right answer is the tokens 0, 1, 2, ..., `tokens`."""

    chance: random.Random
    state: State = field(default_factory=State)
    now_s: float = 0.0
    is_calm: bool = False  # from now on nothing is lost any more
    sent: list[int] = field(default_factory=list)
    ends: list[Exception | None] = field(default_factory=list)
    waits: list[Pause | Decide] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    firsts: list[FirstTokenArrived] = field(default_factory=list)  # on their way, in any order
    messages: dict[int, list[tuple[int, OutputDelta]]] = field(default_factory=dict)  # in order
    attempts: dict[int, Told] = field(default_factory=dict)
    counted: int = 0  # losses that may be the request's fault
    fields: set[str] = field(default_factory=set)  # of the decision, that its attempt has sent
    seen: Counter[tuple[Phase, type]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tokens = self.chance.randint(1, TOKENS_MAX)
        self.is_paced = self.chance.random() < 0.5
        self.holds_first = self.chance.random() < 0.2
        limit_s = self.chance.choice([5.0, 60.0])
        self.attempts_max = self.chance.randint(1, 3)
        attempts = Attempts(self.attempts_max, 0.0, 60.0, limit_s)
        self.hear(Understood(attempts, self.is_paced, 0.0))

    # --- what may happen

    def stimuli(self) -> list[Stimulus]:
        found: list[Stimulus] = []
        for wait in self.waits:
            found.append(lambda wait=wait: self.wait_over(wait))
        for call in self.calls:
            found += [lambda call=call: self.call_over(call)] * 2
            if call.is_decode:
                found += [lambda call=call: self.decode(call)] * 4
        for first in self.firsts:
            found.append(lambda first=first: self.firsts.remove(first) or first)
        for attempt, waiting in self.messages.items():
            if waiting:
                found += [lambda attempt=attempt: self.deliver(attempt)] * 3
        found.append(self.time)
        if not self.is_calm and self.chance.random() < 0.3:
            found += [self.lose, self.silence]
            if self.chance.random() < 0.2:
                found += [lambda: Unwanted(Cancelled("left")), lambda: Failed(ValueError("broke"))]
        return found

    def wait_over(self, wait: Pause | Decide) -> LifecycleEvent:
        self.waits.remove(wait)
        if isinstance(wait, Pause):
            self.now_s += wait.seconds
            return PauseOver(self.now_s)
        if not self.is_calm and self.chance.random() < 0.2:
            errors = [Overloaded("no_decode_worker", "none", 1.0), WorkerGone("away")]
            return NotRouted(wait.attempt, self.chance.choice(errors), self.now_s)
        self.attempts[wait.attempt] = Told()
        prefill, decode = self.chance.choice(PREFILLS), self.chance.choice(DECODES)
        return Routed(wait.attempt, prefill, decode, self.now_s)

    def call_over(self, call: Call) -> LifecycleEvent:
        self.calls.remove(call)
        self.attempts[call.attempt].calls -= 1
        if not self.is_calm and self.chance.random() < 0.25:
            errors: list[Exception] = [
                KvMissing("gone"),
                StoreLost("down"),
                WorkerGone("left"),
                WorkerUnavailable("died"),
                WorkerRefused("keys"),
                WorkerUnreached("cut"),
                Overloaded("store_full", "full", 1.0),
                Overloaded("decode_slow", "slow", 1.0),
                ValueError("a mistake"),
            ]
            return CallFailed(call.attempt, self.chance.choice(errors), self.now_s)
        if call.is_decode:
            left = text(self.first_of(call) + call.decoded, self.tokens)
            return DecodeReplied(
                call.attempt, call.decoded, left, "length", {"decode": "d"}, self.now_s
            )
        first = self.first_text(call)
        if not first.finish_reason and self.chance.random() < 0.8:  # else it was lost
            self.firsts.append(FirstTokenArrived(call.attempt, first, self.now_s))
            if self.chance.random() < 0.5:  # it comes first, and the reply another time
                self.calls.append(call)
                self.attempts[call.attempt].calls += 1
                message = self.firsts.pop()
                return message
        return PrefillReplied(call.attempt, first, 0.5, {"prefill": "p"}, self.now_s)

    def first_text(self, call: Call) -> FirstText:
        reason = "length" if call.base + 1 >= self.tokens else ""
        is_held = self.holds_first and not reason
        return FirstText(text(call.base, call.base + (not is_held)), reason, 64)

    def first_of(self, call: Call) -> int:
        """The first token that decode tells of: a held one comes from there."""
        return call.base + (not self.holds_first)

    def decode(self, call: Call) -> LifecycleEvent | None:
        """A step brings tokens: a message leaves, and may get lost."""
        start = self.first_of(call) + call.decoded
        end = min(start + self.chance.randint(1, 2), self.tokens - 1)
        if end <= start:
            return None
        is_lost = not self.is_calm and self.chance.random() < 0.03
        if not is_lost:
            waiting = self.messages.setdefault(call.attempt, [])
            waiting.append((call.decoded, text(start, end)))
        call.decoded += end - start
        return None

    def deliver(self, attempt: int) -> LifecycleEvent:
        count = self.chance.randint(1, len(self.messages[attempt]))
        news, self.messages[attempt] = (
            self.messages[attempt][:count],
            self.messages[attempt][count:],
        )
        gap_s = self.chance.choice([0.0, 0.05, 1.0])
        return TokensArrived(attempt, "d", news, self.now_s, gap_s)

    def time(self) -> LifecycleEvent:
        self.now_s += self.chance.choice([0.01, 0.1, 6.0 if self.is_calm else 1.0])
        return TimePassed(self.now_s)

    def worker(self) -> WorkerId:
        at_it = self.state.attempt.worker
        return at_it if at_it and self.chance.random() < 0.5 else self.chance.choice(DECODES)

    def lose(self) -> LifecycleEvent:
        return WorkerLost(self.worker(), self.now_s - self.chance.choice([0.0, 3.0]), self.now_s)

    def silence(self) -> LifecycleEvent:
        return WorkerSilent(self.worker(), self.now_s)

    # --- what the machine does about it

    def hear(self, event: LifecycleEvent) -> None:
        before = self.state
        self.state, actions = step(before, event)
        if isinstance(event, WorkerLost | WorkerSilent) and event.worker != before.attempt.worker:
            attempt = self.state.attempt
            if attempt.is_decode_lost and isinstance(event, WorkerLost):
                attempt = attempt._replace(is_decode_lost=before.attempt.is_decode_lost)
            assert self.state._replace(attempt=attempt) == before, "it was another one's worker"
            assert not actions
        if any(isinstance(action, CallDecode) for action in actions):
            assert not before.attempt.is_decode_lost, "a worker is called that is gone"
        number = getattr(event, "attempt", before.attempt.number)
        if number == before.attempt.number:
            self.seen[before.phase, type(event)] += 1
            assert self.state.phase in TABLE[before.phase, type(event)].to
        for action in actions:
            self.carry_out(action)
        self.check()

    def carry_out(self, action: LifecycleAction) -> None:
        told = self.attempts.get(getattr(action, "attempt", 0))
        if isinstance(action, Pause | Decide):
            assert not self.waits, "one thing at a time"
            is_pause = isinstance(action, Pause)  # behind it there may be no further attempt
            assert is_pause or self.counted < self.attempts_max, "the last that counts ends it"
            self.waits.append(action)
        elif isinstance(action, CallPrefill | CallDecode):
            assert told is not None and told.calls == 0 and told.ended == 0
            told.calls, told.was_called = 1, True
            is_decode = isinstance(action, CallDecode)
            base = self.state.attempt.sent_before
            self.calls.append(Call(action.attempt, base, is_decode))
        elif isinstance(action, Send):
            assert not self.ends, "nothing is sent behind the end"
            assert action.output_tokens == len(action.delta.token_ids)
            self.sent += action.delta.token_ids
            assert not self.fields & action.fields.keys(), "a field is sent once"
            self.fields |= action.fields.keys()
        elif isinstance(action, NoteLoss):
            self.fields.clear()
            self.counted += RULES[action.loss].counts
        elif isinstance(action, End):
            self.ends.append(action.error)
        elif isinstance(action, EndAttempt):
            assert told is not None
            told.ended += 1
            told.is_complete = action.output_tokens is not None
            if told.is_complete:
                assert action.output_tokens == self.tokens - self.state.attempt.sent_before
        elif isinstance(action, ReleaseKv):
            assert told is not None and told.calls == 0, "a worker may still write it"
            told.released += 1
        elif isinstance(action, StopWorkers | NotePrefill):
            assert told is not None and told.released == 0, "it is forgotten with its release"

    def check(self) -> None:
        assert self.sent == list(range(len(self.sent))), "each token once and in order"
        assert len(self.sent) == self.state.sent_tokens <= self.tokens
        assert len(self.ends) == (self.state.phase is Phase.DONE), "one end"
        if self.ends == [None]:
            assert len(self.sent) == self.tokens
        assert all(told.ended <= 1 and told.released <= 1 for told in self.attempts.values())
        running = sum(told.calls for told in self.attempts.values())
        assert running == len(self.calls)

    @property
    def is_over(self) -> bool:
        return self.state.phase is Phase.DONE and not (self.waits or self.calls)

    def check_released(self) -> None:
        """Behind the last event of a request."""
        for number, told in self.attempts.items():
            assert told.ended == 1, f"nobody ended attempt {number}"
            is_decoded = self.ends == [None] and number == self.state.attempt.number
            is_first_token = self.tokens == self.state.attempt.sent_before + 1
            needs_release = told.was_called and (not is_decoded or is_first_token)
            assert told.released == needs_release, f"the KV of attempt {number}"
            assert told.is_complete == is_decoded


def run_through(world: World, chance: random.Random) -> int:
    """One request until nothing of it is left; how many events that took."""
    events = 0
    calm_after = chance.randint(0, 40)
    while not world.is_over:
        world.is_calm = events >= calm_after
        event = chance.choice(world.stimuli())()
        if event is not None:
            events += 1
            world.hear(event)
        assert events < 2_000, f"it never ends: {world.state}"
    world.check_released()
    return events


@pytest.mark.slow
def test_a_hundred_thousand_events_keep_the_invariants(seed: int) -> None:
    chance = random.Random(seed)
    events, requests, seen = 0, 0, Counter[tuple[Phase, type]]()
    outcomes: Counter[str] = Counter()
    while events < EVENTS:
        world = World(chance)
        events += run_through(world, chance)
        requests += 1
        seen += world.seen
        [error] = world.ends
        outcomes[type(error).__name__] += 1
        assert error is None or isinstance(error, ServingError | ValueError)
    # Of a walk that is long enough: it has been everywhere, and most answers are complete.
    unseen = set(TABLE) - set(seen)
    kinds = {(phase.value, kind.__name__) for phase, kind in unseen}
    assert all(phase in ("reading", "done") for phase, _ in kinds), sorted(kinds)
    assert outcomes["NoneType"] > requests / 4, outcomes
