"""A request is retried after a loss, with the same tokens, or ends with an error that names it."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from backends.config_pbtxt import FrontendConfig
from backends.errors import (
    Cancelled,
    InvalidRequest,
    KvMissing,
    Overloaded,
    ServingError,
    StoreLost,
    WorkerGone,
    WorkerUnavailable,
)
from backends.frontend.cluster_view import Served
from backends.frontend.decisions.latest import Decided
from backends.frontend.lifecycle.attempts import CALL_SILENCE_S_MAX
from backends.frontend.lifecycle.events import TokensArrived, Unwanted, WorkerLost
from backends.frontend.lifecycle.machine import UNWANTED, Phase
from backends.frontend.live_request import LiveRequest, Services
from backends.frontend.request_times import RequestTimes
from backends.metrics.page import Observations
from backends.tenants.principal import Principal
from backends.tensors import string_tensor
from backends.text.text_stream import OutputDelta
from backends.tracing.export import begin_trace
from backends.workers.protocol import (
    REPLY_BODY,
    REPLY_IDS,
    REQUEST_BODY,
    REQUEST_IDS,
    CopyToken,
    DecodeReply,
    DecodeRequest,
    FirstToken,
    PrefillReply,
    PrefillRequest,
    Stop,
    WorkerFailure,
    encode,
)
from conductor.config import ConductorConfig
from conductor.messages import AppliedLimits, Prediction, Reject, Request, Route, WorkerRef
from tests.backends.asking import TOKENIZER, Client, array

SERVED = Served("print", 64, 4096, ("prefill_0", "decode_0"))
PROMPT, TOKENS = [1, 2, 3], 40
ANSWER = list(range(7, 7 + TOKENS))  # the only right one
NOTHING = Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
LIMITS = AppliedLimits(2.0, 0.25, 1.5, 0.2)
P, D = ("prefill_0", "p"), ("decode_0", "d")


def reject(kind: str) -> Reject:
    return Reject("r", kind, "nobody is there", None, 1.0)


@dataclass
class Cluster:
    """Decides what `decisions` says, in turn; a route where it says nothing."""

    decisions: list[Reject | None] = field(default_factory=list)
    config: ConductorConfig = field(default_factory=ConductorConfig)
    asked: list[Request] = field(default_factory=list)
    failed: list[object] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    pins: ServingError | None = None
    used: Callable[..., None] = lambda *_: None
    charged: Callable[[str], None] = lambda tenant: None
    has_other_frontends: bool = False

    def served(self) -> Served | None:
        return SERVED

    def inboxes(self, worker_id: str) -> list[str]:
        return []

    def excluded_by_pins(self, *_: str) -> frozenset[tuple[str, str]]:
        if self.pins is not None:
            raise self.pins
        return frozenset()

    def decide(self, request: Request, wants_candidates: bool) -> Decided | Reject:
        self.asked.append(request)
        if self.decisions and (decision := self.decisions.pop(0)) is not None:
            return decision
        pair = [WorkerRef(f"{r}_0", r[0], "s0", f"ipc://{r[0]}") for r in ("prefill", "decode")]
        route = Route(request.request_id, *pair, 0, 5, 0, None, NOTHING, None, 0.0, 2)
        return Decided(replace(route, limits=LIMITS), 0.0)

    def prefill_finished(self, *_: object) -> None: ...

    def worker_refused(self, worker_id: str, incarnation: str) -> None:
        self.refused.append(worker_id)

    def release(self, owner: str) -> None:
        self.released.append(owner)

    def finished(self, request_id: str, output_tokens: int | None = None) -> None:
        self.finished_ids.append(request_id)

    def worker_failed(self, worker_id: str, incarnation: str) -> None:
        self.failed.append(worker_id)


@dataclass
class Calls:
    """Workers that fail as `outcomes` of "prefill_0" and "decode_0" say, in turn."""

    outcomes: dict[str, list[ServingError | None]]
    on_call: Callable[[str], None] = lambda model: None
    bodies: list[Any] = field(default_factory=list)
    samples_copies: bool = True
    cancelled: list[str] = field(default_factory=list)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def __call__(
        self,
        address: str,
        model: str,
        inputs: Mapping[str, np.ndarray],
        outputs: list[str],
        request_id: str,
    ) -> Iterator[dict[str, np.ndarray]]:
        kind = PrefillRequest if model.startswith("prefill") else DecodeRequest
        self.bodies.append(msgspec.msgpack.decode(inputs[REQUEST_BODY][0], type=kind))
        self.on_call(model)
        due = self.outcomes.get(model, [])
        if (error := due.pop(0) if due else None) is not None:
            body: msgspec.Struct = WorkerFailure(error.wire_message())
            yield {REPLY_IDS: np.zeros(0, np.int32), REPLY_BODY: string_tensor(encode(body))}
        elif kind is PrefillRequest:
            token_id = ANSWER[len(inputs[REQUEST_IDS]) - len(PROMPT)]
            copies = [CopyToken(token_id) for _ in self.bodies[-1].copies]
            body = PrefillReply("p", 0, 0, 0, [], 0.0, 0.0, 0.0, 0.0)
            if self.samples_copies:
                body = msgspec.structs.replace(body, copies=copies)
            ids = np.array([token_id], np.int32)
            yield {REPLY_IDS: ids, REPLY_BODY: string_tensor(encode(body))}
        else:
            rest = ANSWER[len(inputs[REQUEST_IDS]) - len(PROMPT) :]
            body = DecodeReply("d", 0, TOKENIZER.decode(rest), [], -1, "length")
            yield {REPLY_IDS: np.array(rest, np.int32), REPLY_BODY: string_tensor(encode(body))}


@dataclass
class Streams:
    """No tokens come by message: all of them with the reply."""

    address: str = "ipc://frontend"
    listening: list[str] = field(default_factory=list)
    silent_since_s: float | None = None
    messages_per_s_max: float = 500.0

    def listen(self, request_id: str, receiver: object, attempt: int) -> None:
        self.listening.append(request_id)

    def called(self, request_id: str) -> None: ...

    def forget(self, request_id: str) -> None:
        self.listening.remove(request_id)

    def seen_s(self, request_id: str) -> float | None:
        return self.silent_since_s


class Case:
    """One request among those stand-ins. What would block runs in `run`, and pauses are none."""

    def __init__(
        self,
        outcomes: dict[str, list[ServingError | None]],
        request_s_max: float = 600.0,
        decisions: list[Reject | None] | None = None,
        on_call: Callable[[str], None] = lambda model: None,
        principal: Principal | None = None,
        parameters: dict[str, Any] | None = None,
        copies: int = 0,
        **inputs: Any,
    ) -> None:
        config = ConductorConfig(request_s_max=request_s_max)
        self.cluster = Cluster(list(decisions or []), config)
        self.calls, self.streams, self.client = Calls(outcomes, on_call), Streams(), Client()
        self.pauses_s: list[float] = []
        self.stopped: list[tuple[str, Stop]] = []
        self.abandoned: list[tuple[str, tuple[str, str]]] = []
        self.ended: list[LiveRequest] = []
        self.works: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.observations = Observations()
        services = Services(
            config=FrontendConfig(),
            tokenizer=TOKENIZER,
            cluster=cast(Any, self.cluster),
            calls=cast(Any, self.calls),
            streams=cast(Any, self.streams),
            outbox=cast(Any, SimpleNamespace(send=lambda *sent: self.stopped.append(sent))),
            unreached=cast(Any, SimpleNamespace(add=lambda *it: self.cluster.failed.append(it))),
            start=lambda work, *arguments: self.works.append((work, arguments)),
            abandon=lambda *call: self.abandoned.append(call),
            on_end=self.ended.append,
        )
        times, now_s = RequestTimes(self.observations, 0.0), time.monotonic()
        principal, trace = principal or Principal(), begin_trace(None, {}, now_s)
        self.copy_clients = [Client() for _ in range(copies)]
        common = (RequestTimes(self.observations, 0.0), now_s, principal, trace)
        self.copies = [
            LiveRequest(services, f"copy{number}", client, *common)
            for number, client in enumerate(self.copy_clients)
        ]
        self.request = LiveRequest(
            services, "r", self.client, times, now_s, principal, trace, self.copies
        )
        for request in (self.request, *self.copies):
            request._is_done = cast(Any, SimpleNamespace(wait=self._wait, set=lambda: None))
        asked = {"input_ids": PROMPT, "max_tokens": TOKENS, "end_id": -1, "stream": True, **inputs}
        arrays = {name: array(name, value) for name, value in asked.items()}
        self.request.start(arrays, parameters or {})

    def _wait(self, seconds: float) -> None:
        self.pauses_s.append(seconds)

    def run(self) -> list[int]:
        """Until nothing is left to do; the tokens that the client got."""
        while self.works:
            work, arguments = self.works.popleft()
            work(*arguments)
        assert self.request.state.phase is Phase.DONE
        assert len(self.client.ends) == 1 and self.ended.count(self.request) == 1
        assert not self.streams.listening and not self.request._assignments.keys() - {self.last}
        return self.client.ids

    @property
    def last(self) -> int:
        return self.request.state.attempt.number

    def error(self) -> ServingError:
        self.run()
        [error] = self.client.ends
        assert isinstance(error, ServingError)
        return error

    @property
    def prefills(self) -> list[PrefillRequest]:
        return [body for body in self.calls.bodies if isinstance(body, PrefillRequest)]


KV_GONE, DOWN = KvMissing("blocks [0] of 1 are gone"), StoreLost("it does not answer")
CRASHED, LEFT = WorkerUnavailable("internal_error: x"), WorkerGone("it is shutting down")
CLIENT_LEFT = Cancelled("the client disconnected")


@pytest.mark.parametrize("error", [KV_GONE, DOWN, LEFT], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("worker", ["prefill_0", "decode_0"])
def test_twenty_losses_that_are_nobody_s_fault_cost_no_answer(
    worker: str, error: ServingError
) -> None:
    case = Case({worker: [error] * 20})
    assert case.run() == ANSWER
    assert [each.near_blocks for each in case.prefills] == [3] * 21, "in memory, not on its disk"


def test_every_attempt_has_an_id_of_its_own_and_is_finished_and_released() -> None:
    case = Case({"decode_0": [KV_GONE] * 4})
    case.run()
    ids = [body.request_id for body in case.prefills]
    assert len(set(ids)) == 5 and case.cluster.finished_ids == ids
    assert case.cluster.released == ids[:-1], "the last one's decode worker releases by itself"


def test_a_worker_that_fails_at_it_three_times_ends_it() -> None:
    case = Case({"prefill_0": [CRASHED] * 5})
    error = case.error()
    assert isinstance(error, WorkerUnavailable)
    assert "3 x a worker failed at the request" in str(error)
    assert len(case.prefills) == 3 and case.cluster.failed == ["prefill_0"] * 3


def test_a_request_that_goes_on_says_so_to_all_and_a_new_one_does_not() -> None:
    case = Case({"decode_0": [KV_GONE]})
    case.run()
    assert [request.is_resumed for request in case.cluster.asked] == [False, True]
    assert [body.is_resumed for body in case.calls.bodies] == [False, False, True, True]
    limits_s = [body.tbt_slo_s for body in case.calls.bodies if isinstance(body, DecodeRequest)]
    assert limits_s == [LIMITS.tbt_slo_s, 0.0]


def test_a_new_request_is_rejected_at_once() -> None:
    case = Case({}, decisions=[reject("no_decode_worker")])
    error = case.error()
    assert isinstance(error, Overloaded) and error.kind == "no_decode_worker"
    assert not case.pauses_s and not case.calls.bodies


def test_a_decode_worker_that_has_no_time_after_all_ends_a_new_request() -> None:
    case = Case({"decode_0": [Overloaded("decode_slow", "too slow", 1.0)]})
    assert isinstance(case.error(), Overloaded) and case.client.ids == ANSWER[:1]
    assert case.cluster.refused == ["decode_0"] and case.cluster.released == ["r-1"]
    counted = {name for name, *_ in case.observations.drain()}
    assert "mooncake_wasted_prefills_total" in counted


def test_beside_other_frontends_a_full_worker_is_left_for_another_one() -> None:
    case = Case({"decode_0": [Overloaded("decode_overload", "by others", 1.0)]})
    case.cluster.has_other_frontends = True
    assert case.run() == ANSWER
    assert [request.excluded_workers for request in case.cluster.asked] == [frozenset(), {D}]
    assert [request.is_resumed for request in case.cluster.asked] == [False, False]
    assert case.cluster.refused == ["decode_0"], "and nobody new is sent there for a while"


def test_a_request_that_finds_all_workers_full_is_rejected_and_does_not_wait() -> None:
    case = Case({"prefill_0": [Overloaded("prefill_queue_full", "by others", 1.0)] * 9})
    case.cluster.has_other_frontends = True
    error = case.error()
    assert isinstance(error, Overloaded) and error.kind == "prefill_queue_full"
    assert len(case.prefills) == 3, "two others were asked"


def test_a_request_that_goes_on_waits_until_somebody_is_there() -> None:
    nobody: list[Reject | None] = [reject("no_decode_worker")] * 30
    case = Case({"decode_0": [LEFT]}, decisions=[None, *nobody])
    assert case.run() == ANSWER
    assert len(case.pauses_s) == 30 and case.pauses_s == sorted(case.pauses_s)


def test_where_nobody_is_there_until_the_deadline_it_ends_with_the_word_for_it() -> None:
    nobody: list[Reject | None] = [reject("no_decode_worker")]
    case = Case({"decode_0": [LEFT]}, decisions=[None, *nobody], request_s_max=1e-9)
    error = case.error()
    assert isinstance(error, WorkerUnavailable) and "deadline has passed" in str(error)


def test_kv_that_is_gone_until_the_deadline_is_kv_missing() -> None:
    error = Case({"decode_0": [KV_GONE]}, request_s_max=1e-9).error()
    assert isinstance(error, KvMissing) and "the KV cache was gone" in str(error)


def test_a_worker_that_was_lost_is_left_out_until_there_is_nobody_else() -> None:
    case = Case({"prefill_0": [CRASHED]}, decisions=[None, reject("no_prefill_worker")])
    assert case.run() == ANSWER
    excluded = [request.excluded_workers for request in case.cluster.asked]
    assert excluded == [frozenset(), {P}, frozenset()]


@pytest.mark.parametrize("worker", ["prefill_0", "decode_0"])
def test_a_client_that_leaves_while_a_worker_is_at_it_ends_it_when_the_worker_has_stopped(
    worker: str,
) -> None:
    def leave(model: str) -> None:
        if model == worker:
            case.client.is_gone = True
            for now_s in (0.0, 1.0, 2.0):
                case.request.look(now_s, awake_s=0.0)
            assert not case.client.ends
            assert len(case.stopped) == 6, "both workers are told at every turn"

    case = Case({"decode_0": [CLIENT_LEFT]}, on_call=leave)
    case.run()
    assert case.client.ends == ["finished"] and len(case.prefills) == 1
    assert {stop.reason for _, stop in case.stopped[:6]} == {UNWANTED}
    assert case.cluster.released == case.cluster.finished_ids == ["r-1"]


def test_a_client_that_leaves_in_a_pause_does_not_sit_it_out() -> None:
    nobody: list[Reject | None] = [reject("no_decode_worker")] * 5
    case = Case({"decode_0": [LEFT]}, decisions=[None, *nobody])

    def leave(seconds: float) -> None:
        case.request.post(Unwanted(CLIENT_LEFT))
        assert case.client.ends == ["finished"]

    case.request._is_done = cast(Any, SimpleNamespace(wait=leave, set=lambda: None))
    case.run()
    assert len(case.cluster.asked) == 2


def test_a_request_past_the_timeout_of_its_client_ends_with_the_word_for_it() -> None:
    case = Case({"prefill_0": [CLIENT_LEFT]})
    work, arguments = case.works.popleft()
    case.request._timeout_s = 0.002
    case.calls.on_call = lambda model: case.request.look(time.monotonic() + 1.0, awake_s=0.0)
    work(*arguments)
    case.request._timeout_s = 0.002
    error = case.error()
    assert isinstance(error, WorkerUnavailable)
    assert str(error) == "its timeout of 2 ms has passed"


def test_a_request_taken_from_a_dead_worker_goes_on_from_the_tokens_that_were_sent() -> None:
    deaths: list[str] = []

    def die(model: str) -> None:
        if model == "decode_0" and not deaths:
            deaths.append(model)
            case.request.post(WorkerLost(D, time.monotonic(), time.monotonic()))
            assert case.calls.cancelled == ["r-1"], "nobody else would end the call"
            # The request runs on in another thread before the dead worker's call has ended.
            work, arguments = case.works.popleft()
            work(*arguments)
            assert case.client.ids == ANSWER

    case = Case({"decode_0": [None, CRASHED]}, on_call=die)
    assert case.run() == ANSWER
    assert case.cluster.asked[1].excluded_workers == {D}
    assert case.cluster.released == ["r-1"], "when its call has ended"


def test_three_workers_that_die_with_it_end_it() -> None:
    def die(model: str) -> None:
        if model == "decode_0":
            case.request.post(WorkerLost(D, time.monotonic(), time.monotonic()))

    case = Case({"decode_0": [CRASHED] * 9}, on_call=die)
    assert "3 x a worker died with the request" in str(case.error())
    assert case.cluster.released == ["r-1", "r-2", "r-3"]


def test_a_worker_that_was_dead_before_the_call_does_not_count() -> None:
    deaths: list[str] = []

    def die(model: str) -> None:
        if model == "decode_0" and len(deaths) < 5:
            deaths.append(model)
            case.request.post(WorkerLost(D, 0.0, time.monotonic()))

    case = Case({"decode_0": [CRASHED] * 5}, on_call=die)
    assert case.run() == ANSWER


FULL = Overloaded("store_full", "no room", 1.0)


@pytest.mark.parametrize("worker", ["prefill_0", "decode_0"])
@pytest.mark.parametrize("error", [FULL, CRASHED, KV_GONE], ids=lambda error: type(error).__name__)
def test_both_workers_are_told_when_an_attempt_ends_without_an_answer(
    worker: str, error: ServingError
) -> None:
    case = Case({worker: [error]})
    case.run()
    assert sorted(inbox for inbox, _ in case.stopped) == ["ipc://d", "ipc://p"]
    assert {stop.request_id for _, stop in case.stopped} == {case.prefills[0].request_id}


def test_a_request_goes_on_when_its_worker_says_nothing_of_it() -> None:
    taken: list[str] = []

    def fall_silent(model: str) -> None:
        if model == "decode_0" and not taken:
            taken.append(model)
            case.streams.silent_since_s = 1_000.0
            awake_s = CALL_SILENCE_S_MAX + 1.0
            case.request.look(1_000.0 + CALL_SILENCE_S_MAX, awake_s)
            case.request.look(1_000.1 + CALL_SILENCE_S_MAX, CALL_SILENCE_S_MAX - 1.0)
            assert not case.abandoned, "who stood still has heard nothing, whoever spoke"
            case.request.look(1_000.1 + CALL_SILENCE_S_MAX, awake_s)
            case.request.look(9_999.0, awake_s)
            assert case.abandoned == [("r-1", D)] and not case.calls.cancelled
            case.streams.silent_since_s = None

    case = Case({"decode_0": [Cancelled("stopped")]}, on_call=fall_silent)
    assert case.run() == ANSWER
    assert case.cluster.asked[1].excluded_workers == {D} and case.cluster.failed == ["decode_0"]


def test_the_first_token_goes_out_ahead_of_the_reply_and_once() -> None:
    def early(model: str) -> None:
        if model == "prefill_0":
            case.request.first_token(1, FirstToken("r-1", ANSWER[0], 0))
            assert case.client.ids == ANSWER[:1]

    case = Case({}, on_call=early)
    assert case.run() == ANSWER


def test_tokens_that_come_while_the_call_runs_go_out_and_the_reply_brings_the_rest() -> None:
    def stream(model: str) -> None:
        if model == "decode_0" and case.last == 1:
            news = [(0, OutputDelta(ANSWER[1:4], "abc"))]
            case.request.post(TokensArrived(1, "d", news, 0.0, 0.0))
            assert case.client.ids == ANSWER[:4]
            case.request.post(TokensArrived(1, "d", [(9, OutputDelta([0], "x"))], 0.0, 0.0))

    case = Case({"decode_0": [CRASHED]}, on_call=stream)
    assert case.run() == ANSWER, "the gap cost another attempt"
    assert case.last == 2


def test_an_answer_that_ends_with_its_first_token_needs_no_decode_worker() -> None:
    case = Case({}, max_tokens=1)
    assert case.run() == ANSWER[:1]
    assert len(case.calls.bodies) == 1 and case.cluster.released == ["r-1"]
    assert case.client.ends == ["answered"]


def test_a_request_that_breaks_limits_hears_of_all_mistakes_and_reaches_nobody() -> None:
    case = Case({}, max_tokens=0, temperature=-1.0)
    error = case.error()
    assert isinstance(error, InvalidRequest) and str(error).count("|") == 1
    assert not case.cluster.asked


@pytest.mark.parametrize(("is_resumed", "kind"), [(False, InvalidRequest), (True, None)])
def test_a_named_worker_that_is_away_is_waited_for_only_by_who_was_let_in(
    is_resumed: bool, kind: type[Exception] | None
) -> None:
    def leave(model: str) -> None:
        case.cluster.pins = InvalidRequest("prefill_worker 'prefill_7' is not serving")

    def come_back(seconds: float) -> None:
        case.cluster.pins = None

    case = Case({"prefill_0": [LEFT]}, on_call=leave if is_resumed else lambda model: None)
    if not is_resumed:
        case.cluster.pins = InvalidRequest("prefill_worker 'prefill_7' is not serving")
    case.request._is_done = cast(Any, SimpleNamespace(wait=come_back, set=lambda: None))
    if kind is not None:
        assert isinstance(case.error(), kind)
    else:
        case.calls.on_call = lambda model: leave(model) if len(case.calls.bodies) == 1 else None
        assert case.run() == ANSWER


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("wants_decision", [True, False])
def test_a_decision_is_shown_only_to_who_wants_it_even_when_it_is_asked_for_by_name(
    is_stream: bool, wants_decision: bool
) -> None:
    case = Case({}, stream=is_stream, return_decision=wants_decision)
    case.run()
    shown: dict[str, object] = {}
    for decision in case.client.decisions:
        shown |= json.loads(decision or b"{}")
    assert {"prefill", "cached_tokens", "ttft_s", "decode_read_bytes"} <= shown.keys() or (
        not wants_decision and not shown
    )


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_message_that_cannot_be_sent_ends_the_request_and_releases_it(is_stream: bool) -> None:
    case = Case({"decode_0": [CLIENT_LEFT] if is_stream else []}, stream=is_stream)
    case.client.error = OSError("no shared memory is left")
    case.run()
    assert case.client.ends == [case.client.error]
    assert case.cluster.finished_ids == ["r-1"]


def test_events_are_handled_one_after_the_other_by_one_thread_at_a_time() -> None:
    case = Case({})
    is_sending, may_go_on = threading.Event(), threading.Event()
    sending: list[str] = []

    def send(outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        sending.append(threading.current_thread().name)
        if not is_sending.is_set():
            is_sending.set()
            assert may_go_on.wait(30.0)
        case.client.ids += outputs["output_ids"].tolist()

    case.client.send = send  # type: ignore[method-assign]
    case.calls.outcomes["decode_0"] = [CLIENT_LEFT]
    owner = threading.Thread(target=case.run, name="owner")
    owner.start()
    assert is_sending.wait(30.0)
    case.request.post(Unwanted(CLIENT_LEFT))  # comes back at once
    assert case.request.state.phase is not Phase.STOPPING and not case.client.ends
    may_go_on.set()
    owner.join(30.0)
    assert case.client.ends == ["finished"] and set(sending) == {"owner"}


def test_a_mistake_of_ours_ends_one_request_and_no_thread() -> None:
    case = Case({})
    case.request.post(TokensArrived(1, "d", [], 0.0, 0.0))  # cannot come while reading
    assert isinstance(case.client.ends[0], AssertionError) and len(case.client.ends) == 1


def test_only_the_newest_attempts_are_remembered(seed: int) -> None:
    """A request may be lost for hours: what is over takes no memory."""
    case = Case({"prefill_0": [KV_GONE] * 300})
    case.run()
    assert len(case.request._assignments) <= 1
