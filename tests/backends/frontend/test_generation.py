"""A request goes on after a loss, with the tokens that it would have given, or ends with the word
for what happened."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.errors import (
    Cancelled,
    KvMissing,
    Overloaded,
    ServingError,
    StoreLost,
    WorkerGone,
    WorkerUnavailable,
)
from backends.frontend.attempt import Message
from backends.frontend.attempts import CALL_SILENCE_S_MAX, Attempts
from backends.frontend.cluster_view import Served
from backends.frontend.decision import Decided
from backends.frontend.generation import Generation
from backends.frontend.live_requests import LiveRequest
from backends.frontend.request_times import RequestTimes
from backends.frontend.token_streams import TokenStream
from backends.frontend.worker_calls import as_text
from backends.metrics.page import Observations
from backends.workers.protocol import (
    REPLY_BODY,
    REPLY_IDS,
    REQUEST_BODY,
    REQUEST_IDS,
    DecodeReply,
    DecodeRequest,
    PrefillReply,
    PrefillRequest,
    WorkerFailure,
    encode,
)
from conductor.config import ConductorConfig
from conductor.messages import Prediction, Reject, Request, Route, WorkerRef
from tests.backends.asking import TOKENIZER, ask

SERVED = Served("print", 64, 4096, ("prefill_0", "decode_0"))
PROMPT, TOKENS = [1, 2, 3], 40
ANSWER = list(range(7, 7 + TOKENS))  # the only right one
NOTHING = Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
Outcome = ServingError | None


def reject(kind: str) -> Reject:
    return Reject("r", kind, "nobody is there", None, 1.0)


@dataclass
class Cluster:
    """Decides what `decisions` says, in turn; a route where it says nothing."""

    decisions: list[Reject | None] = field(default_factory=list)
    config: ConductorConfig = field(default_factory=ConductorConfig)
    asked: list[Request] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)

    def excluded_by_pins(self, *_: str) -> frozenset[tuple[str, str]]:
        return frozenset()

    def decide(self, request: Request, wants_candidates: bool) -> Decided | Reject:
        self.asked.append(request)
        decision = self.decisions.pop(0) if self.decisions else None
        if decision is not None:
            return decision
        prefill = WorkerRef("prefill_0", "p", "s0", "ipc://p")
        decode = WorkerRef("decode_0", "d", "s0", "ipc://d")
        return Decided(Route(request.request_id, prefill, decode, 0, 0, 0, None, NOTHING), 0.0)

    def prefill_finished(self, *_: object) -> None: ...
    def worker_refused(self, *_: object) -> None: ...
    def release(self, owner: str) -> None: ...

    def finished(self, request_id: str, output_tokens: int | None = None) -> None:
        self.finished_ids.append(request_id)

    def worker_failed(self, worker_id: str, incarnation: str) -> None:
        self.failed.append(worker_id)


@dataclass
class Calls:
    """Workers that fail as `outcomes` of "prefill_0" and "decode_0" say, in turn."""

    outcomes: dict[str, list[Outcome]]
    on_call: Callable[[str], None] = lambda model: None
    bodies: list[Any] = field(default_factory=list)

    def __call__(
        self, address: str, model: str, inputs: Mapping[str, np.ndarray], outputs: list[str],
        request_id: str,
    ) -> Iterator[dict[str, np.ndarray]]:  # fmt: skip
        kind = PrefillRequest if model.startswith("prefill") else DecodeRequest
        self.bodies.append(msgspec.msgpack.decode(inputs[REQUEST_BODY][0], type=kind))
        self.on_call(model)
        due = self.outcomes.get(model, [])
        if (error := due.pop(0) if due else None) is not None:
            body: msgspec.Struct = WorkerFailure(error.wire_message())
            yield {REPLY_IDS: np.zeros(0, np.int32), REPLY_BODY: as_text(encode(body))}
        elif kind is PrefillRequest:
            body = PrefillReply("p", 0, 0, 0, [], 0.0, 0.0, 0.0, 0.0)
            sampled = ANSWER[len(inputs[REQUEST_IDS]) - len(PROMPT)]
            yield {REPLY_IDS: np.array([sampled], np.int32), REPLY_BODY: as_text(encode(body))}
        else:
            rest = ANSWER[len(inputs[REQUEST_IDS]) - len(PROMPT) :]
            body = DecodeReply("d", 0, TOKENIZER.decode(rest), [], -1, "length")
            yield {REPLY_IDS: np.array(rest, np.int32), REPLY_BODY: as_text(encode(body))}


class Streams:
    """No tokens come by message: all of them with the reply."""

    address = "ipc://frontend"

    def __init__(self) -> None:
        self.silent_since_s: float | None = None

    def heard_s(self, request_id: str) -> float | None:
        return self.silent_since_s

    def expecting(self, *_: object) -> Any:
        return _Nothing()

    def reading(self, request_id: str, deliver: Any, is_paced: bool) -> Any:
        return _Nothing(TokenStream(request_id, deliver, is_paced))


class _Nothing:
    def __init__(self, value: object = None) -> None:
        self._value = value

    def __enter__(self) -> object:
        return self._value

    def __exit__(self, *_: object) -> None: ...


class Case:
    """One request among those stand-ins; pauses take no time."""

    def __init__(
        self, outcomes: dict[str, list[Outcome]], request_s_max: float = 600.0,
        decisions: list[Reject | None] | None = None,
        on_call: Callable[[str], None] = lambda model: None,
    ) -> None:  # fmt: skip
        self.cluster, self.calls = Cluster(list(decisions or [])), Calls(outcomes, on_call)
        self.pauses_s: list[float] = []
        self.sent: list[Message] = []
        self.streams = Streams()
        self.stopped: list[tuple[str, Sequence[WorkerRef]]] = []
        client = SimpleNamespace(is_cancelled=lambda: False)
        self.live = LiveRequest("r", client, RequestTimes(Observations(), 0.0), time.monotonic())

        def pause(seconds: float) -> None:
            self.pauses_s.append(seconds)
            self.live.check()

        self.live.pause = pause  # type: ignore[method-assign]
        request = ask(input_ids=PROMPT, max_tokens=TOKENS, end_id=-1)
        self.generation = Generation(
            request, self.live, self.cluster, self.calls, self.streams, TOKENIZER,  # type: ignore[arg-type]
            self.sent.append, Attempts(3, self.live.arrived_s, request_s_max),
            lambda request_id, workers, reason: self.stopped.append((request_id, workers)),
        )  # fmt: skip

    def run(self) -> list[int]:
        assert self.generation.run(SERVED)
        return [token for message in self.sent for token in message.emission.token_ids]

    @property
    def prefills(self) -> list[PrefillRequest]:
        return [body for body in self.calls.bodies if isinstance(body, PrefillRequest)]


KV_GONE, DOWN = KvMissing("blocks [0] of 1 are gone"), StoreLost("it does not answer")
CRASHED, LEFT = WorkerUnavailable("internal_error: x"), WorkerGone("it is shutting down")


@pytest.mark.parametrize("error", [KV_GONE, DOWN, LEFT], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("worker", ["prefill_0", "decode_0"])
def test_twenty_losses_that_are_nobody_s_fault_cost_no_answer(
    worker: str, error: ServingError
) -> None:
    case = Case({worker: [error] * 20})
    assert case.run() == ANSWER
    assert len(case.prefills) == 21


def test_every_attempt_has_an_id_of_its_own_and_is_finished() -> None:
    case = Case({"decode_0": [KV_GONE] * 4})
    case.run()
    ids = [body.request_id for body in case.prefills]
    assert len(set(ids)) == 5 and set(ids) <= set(case.cluster.finished_ids)


def test_a_worker_that_fails_at_it_three_times_ends_it() -> None:
    case = Case({"prefill_0": [CRASHED] * 5})
    with pytest.raises(WorkerUnavailable, match="3 x a worker failed at it"):
        case.run()
    assert len(case.prefills) == 3 and case.cluster.failed == ["prefill_0"] * 3


def test_a_request_that_goes_on_says_so_to_all_and_a_new_one_does_not() -> None:
    case = Case({"decode_0": [KV_GONE]})
    case.run()
    assert [request.is_resumed for request in case.cluster.asked] == [False, True]
    assert [body.is_resumed for body in case.calls.bodies] == [False, False, True, True]
    limits_s = [body.tbt_slo_s for body in case.calls.bodies if isinstance(body, DecodeRequest)]
    assert limits_s == [case.cluster.config.arrival_tbt_slo_s, 0.0]


def test_a_new_request_is_rejected_at_once() -> None:
    case = Case({}, decisions=[reject("no_decode_worker")])
    with pytest.raises(Overloaded) as caught:
        case.run()
    assert caught.value.kind == "no_decode_worker" and not case.pauses_s


def test_a_request_that_goes_on_waits_until_somebody_is_there() -> None:
    nobody: list[Reject | None] = [reject("no_decode_worker")] * 30
    case = Case({"decode_0": [LEFT]}, decisions=[None, *nobody])
    assert case.run() == ANSWER
    assert len(case.pauses_s) == 31 and case.pauses_s == sorted(case.pauses_s)


def test_where_nobody_is_there_until_the_deadline_it_ends_with_the_word_for_it() -> None:
    nobody: list[Reject | None] = [reject("no_decode_worker")]
    case = Case({"decode_0": [LEFT]}, decisions=[None, *nobody], request_s_max=1e-9)
    with pytest.raises(WorkerUnavailable, match="deadline has passed"):
        case.run()


def test_kv_that_is_gone_until_the_deadline_is_kv_missing() -> None:
    with pytest.raises(KvMissing, match="its KV was gone"):
        Case({"decode_0": [KV_GONE]}, request_s_max=1e-9).run()


def test_a_worker_that_was_lost_is_left_out_until_there_is_nobody_else() -> None:
    case = Case({"prefill_0": [CRASHED]}, decisions=[None, reject("no_prefill_worker")])
    assert case.run() == ANSWER
    excluded = [request.excluded_workers for request in case.cluster.asked]
    assert excluded == [frozenset(), {("prefill_0", "p")}, frozenset()]


def test_a_client_that_leaves_while_its_request_waits_ends_it() -> None:
    def leave(model: str) -> None:
        if model == "decode_0":
            case.live.end(Cancelled("the client went away"))

    case = Case({"decode_0": [KV_GONE] * 5}, on_call=leave)
    with pytest.raises(Cancelled):
        case.run()
    assert len(case.prefills) == 1


def test_a_request_taken_from_a_dead_worker_goes_on_from_the_tokens_that_were_sent() -> None:
    is_lost, is_resumed = threading.Event(), threading.Event()

    def die(model: str) -> None:
        if model == "decode_0" and not is_lost.is_set():
            assert case.generation.lost("decode_0", "d", heard_s=math.inf)
            is_lost.set()
            assert is_resumed.wait(30.0)  # the dead worker's stream does not end

    case = Case({"decode_0": [CRASHED]}, on_call=die)
    ended: list[bool] = []
    stale = threading.Thread(target=lambda: ended.append(case.generation.run(SERVED)))
    stale.start()
    assert is_lost.wait(30.0)
    # The request runs on in this thread; the outcome that the dead worker owes comes to the old.
    case.calls.outcomes.clear()
    assert case.run() == ANSWER
    is_resumed.set()
    stale.join(30.0)
    assert ended == [False]
    assert [token for message in case.sent for token in message.emission.token_ids] == ANSWER


def test_three_workers_that_die_with_it_end_it() -> None:
    def die(model: str) -> None:
        if model == "decode_0":
            assert case.generation.lost("decode_0", "d", heard_s=math.inf)

    case = Case({}, on_call=die)
    for _ in range(2):
        assert not case.generation.run(SERVED)
    assert not case.generation.run(SERVED)
    with pytest.raises(WorkerUnavailable, match="3 x a worker died with it"):
        case.generation.run(SERVED)


def test_a_worker_that_was_dead_before_the_call_does_not_count() -> None:
    deaths = 0

    def die(model: str) -> None:
        nonlocal deaths
        if model == "decode_0" and deaths < 5:
            deaths += 1
            assert case.generation.lost("decode_0", "d", heard_s=0.0)

    case = Case({}, on_call=die)
    for _ in range(5):
        assert not case.generation.run(SERVED)
    assert case.run()


FULL = Overloaded("store_full", "no room", 1.0)


@pytest.mark.parametrize("worker", ["prefill_0", "decode_0"])
@pytest.mark.parametrize("error", [FULL, CRASHED, KV_GONE], ids=lambda error: type(error).__name__)
def test_both_workers_are_told_when_an_attempt_ends_without_an_answer(
    worker: str, error: ServingError
) -> None:
    case = Case({worker: [error]})
    case.run()
    [(request_id, workers)] = case.stopped
    assert request_id == case.prefills[0].request_id
    assert [told.worker_id for told in workers] == ["prefill_0", "decode_0"]


def test_a_request_goes_on_when_its_worker_says_nothing_of_it() -> None:
    is_taken, is_over = threading.Event(), threading.Event()

    def fall_silent(model: str) -> None:
        if model == "decode_0" and not is_taken.is_set():
            assert case.generation.fell_silent(1_000.0) is None  # nobody waits
            case.streams.silent_since_s = 1_000.0
            assert case.generation.fell_silent(1_000.0 + CALL_SILENCE_S_MAX) is None
            found = case.generation.fell_silent(1_000.1 + CALL_SILENCE_S_MAX)
            assert found == ("decode_0", "d")
            assert case.generation.fell_silent(9_999.0) is None  # once
            is_taken.set()
            assert is_over.wait(30.0)

    case = Case({"decode_0": [Cancelled("stopped")]}, on_call=fall_silent)
    ended: list[bool] = []
    stale = threading.Thread(target=lambda: ended.append(case.generation.run(SERVED)))
    stale.start()
    assert is_taken.wait(30.0)
    case.calls.outcomes.clear()
    assert case.run() == ANSWER
    is_over.set()
    stale.join(30.0)
    assert ended == [False]
    assert case.cluster.asked[1].excluded_workers == {("decode_0", "d")}
