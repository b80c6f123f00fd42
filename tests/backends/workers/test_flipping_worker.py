"""Workers that change their role while they serve: no request is lost, and tokens stay right."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import ConfigError, WorkerGone, WrongRole, from_wire
from backends.launcher.repository import WORKER_READY_OR_LOAD
from backends.triton.worker_kinds import make_flipping_worker, read_worker_configs
from backends.workers.protocol import (
    DecodeRequest,
    DrainWorker,
    PrefillRequest,
    TakeRole,
    decode_message,
    encode,
    open_outbox,
)
from backends.workers.roles import flipping_worker
from bench.harness.generate import generate
from tests.backends.small_tokenizers import DEMO
from tests.backends.workers.pair import WAIT_S, Pair
from tests.e2e.server import wait_until

OTHER = {"prefill": "decode", "decode": "prefill"}
MAX_TOKENS = 12


def prompt(number: int) -> list[int]:
    return [20 + (number * 7919 + index * index * (number + 1)) % 2000 for index in range(150)]


class Flipping(Pair):
    """Two prefill and two decode workers, all of which can change."""

    def _make(self) -> None:
        self.workers: list[Any] = []
        self.is_over = threading.Event()
        self.outbox = open_outbox()
        for number, role in enumerate(("prefill", "prefill", "decode", "decode")):
            configs = read_worker_configs(role, f"w{number}", {**self._raw, "roles": "both"}, 1)
            self.workers.append(
                make_flipping_worker(role, f"w{number}", self._repository, *configs)
            )

    def of(self, role: str) -> list[Any]:
        return [w for w in self.workers if w.active and w.active.process.info.role == role]

    def role_of(self, number: int) -> str:
        active = self.workers[number].active
        return active.process.info.role if active is not None else ""

    def tell(self, number: int, role: str, incarnation: str = "") -> None:
        """By its inbox, as a frontend does."""
        process = self.workers[number].active.process
        self.outbox.send(process.info.inbox, TakeRole(role, incarnation or process.incarnation))

    def flip(self, number: int) -> None:
        role = OTHER[self.role_of(number)]
        self.tell(number, role)
        wait_until(lambda: self.role_of(number) == role, f"w{number} to be {role}", WAIT_S)

    def serve(self, request_id: str, ids: list[int]) -> tuple[list[int], int]:
        """As a frontend: elsewhere, when a worker is gone. (tokens, attempts)."""
        for attempt in itertools.count(1):
            assert attempt < 200, "nobody serves it"
            self.is_over.wait(0.002 * (attempt - 1))  # as a frontend pauses between attempts
            asked = Attempt(self, f"{request_id}-{attempt}", ids, attempt)
            asked.start()
            asked.wait_over()
            if asked.error is None:
                return asked.output_ids, attempt
            assert isinstance(asked.error, WorkerGone), asked.error

    def close(self) -> None:
        self.is_over.set()
        self.outbox.close()
        for worker in self.workers:
            worker.close(WAIT_S)
        self._node.close()


class Attempt:
    def __init__(self, fleet: Flipping, request_id: str, ids: list[int], turn: int) -> None:
        self.fleet, self.request_id, self.ids, self.turn = fleet, request_id, ids, turn
        self.output_ids: list[int] = []
        self.error: Exception | None = None
        self._is_over = threading.Event()
        self.wait_over = lambda: self._is_over.wait(WAIT_S) or pytest.fail("never answered")

    def _chosen(self, role: str) -> Any:
        workers = [w for w in self.fleet.of(role) if w.active and not w.active.is_changing]
        if not workers:
            raise WorkerGone(f"no {role} worker just now")
        return workers[self.turn % len(workers)]

    def start(self) -> None:
        """Both workers are chosen now, as a frontend does; either may change before it is asked."""
        try:
            prefill, self.decode = self._chosen("prefill"), self._chosen("decode")
            active = self.decode.active
            if active is None:
                raise WorkerGone("it is changing")
            request = PrefillRequest(
                request_id=self.request_id,
                prompt_tokens=len(self.ids),
                sampling=SamplingParams(max_tokens=MAX_TOKENS),
                cache_salt="",
                fetch_blocks=0,
                decode_inbox=active.process.inbox.address,
                reply_inbox="",
                reserve_tokens=len(self.ids) + MAX_TOKENS,
            )
            prefill.submit(request, np.array(self.ids, np.int32), self)
        except Exception as error:
            self.fail(error)

    def prefilled(self, token_id: int, reply: Any) -> None:
        self.output_ids.append(token_id)
        request = DecodeRequest(
            request_id=self.request_id,
            prompt_tokens=len(self.ids),
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            cache_salt="",
            blocks=reply.blocks,
            stream_interval=0,
            reply_inbox="",
            native=reply.native,
        )
        try:
            self.decode.submit(request, np.array([*self.ids, token_id], np.int32), self)
        except Exception as error:
            self.fail(error)

    def decoded(self, token_ids: list[int], reply: Any) -> None:
        self.output_ids += token_ids
        self._is_over.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._is_over.set()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flipping]:
    monkeypatch.setattr(flipping_worker, "IDLE_S", 0.05)
    found = Flipping(tmp_path, monkeypatch)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    engine = TorchEngine.load(DEMO, pages_max=32, block_tokens=64)
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    return [generate(engine, [prompt(number)], sampling)[0] for number in range(6)]


@pytest.mark.slow
def test_requests_flow_with_the_right_tokens_while_workers_flip_there_and_back(
    fleet: Flipping, wanted: list[list[int]]
) -> None:
    answers: list[tuple[int, list[int]]] = []
    is_over, problems = fleet.is_over, []

    def ask_on(number: int) -> None:
        try:
            for count in itertools.count():
                if is_over.is_set():
                    return
                which = (number + count) % len(wanted)
                answers.append((which, fleet.serve(f"c{number}-{count}", prompt(which))[0]))
        except BaseException as problem:
            problems.append(problem)
            raise

    clients = [threading.Thread(target=ask_on, args=(number,)) for number in range(3)]
    for client in clients:
        client.start()
    incarnations = {fleet.workers[1].active.process.incarnation}
    for number in (1, 1, 2, 2, 1, 1):
        before = len(answers)
        fleet.flip(number)
        incarnations.add(fleet.workers[1].active.process.incarnation)
        wait_until(lambda b=before: len(answers) > b + 3, "requests to flow", WAIT_S)
    is_over.set()
    for client in clients:
        client.join(WAIT_S)
    assert not problems
    assert len(incarnations) == 5 and len(answers) > 18
    for which, tokens in answers:
        assert tokens == wanted[which]
    for worker in fleet.workers:
        wait_until(lambda w=worker: w.active.is_idle, "it to be idle", WAIT_S)
        worker.active.check()
        assert worker.active.driver.engine.pages.used_pages == 0


def test_a_flip_does_not_look_like_a_load_to_the_launcher(
    fleet: Flipping, caplog: pytest.LogCaptureFixture
) -> None:
    """It would wait for Triton to say that the model is loaded, and start it again."""
    caplog.set_level("INFO")
    fleet.flip(1)
    said = [record.getMessage() for record in caplog.records]
    assert any("has another role on node" in each for each in said)
    assert not any(WORKER_READY_OR_LOAD.search(each) for each in said), said


def test_a_call_for_the_other_role_is_refused_by_its_type(fleet: Flipping) -> None:
    asked = Attempt(fleet, "r", prompt(0), 0)
    fleet.workers[0], fleet.workers[2] = fleet.workers[2], fleet.workers[0]
    request = PrefillRequest(
        request_id="r",
        prompt_tokens=3,
        sampling=SamplingParams(max_tokens=4),
        cache_salt="",
        fetch_blocks=0,
        decode_inbox="",
        reply_inbox="",
        reserve_tokens=9,
    )
    with pytest.raises(WrongRole, match="its role is decode, the call is a PrefillRequest") as said:
        fleet.workers[0].submit(request, np.array([3, 4, 5], np.int32), asked)
    assert type(from_wire(said.value.wire_message(), "w0")) is WrongRole
    assert isinstance(said.value, WorkerGone), "its frontend goes on elsewhere"


def test_a_worker_that_an_operator_drains_while_it_changes_drains_in_its_new_role(
    fleet: Flipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = fleet.workers[0]
    old = worker.active
    close = old.close

    def drain_then_leave(timeout_s: float) -> None:
        fleet.outbox.send(old.process.info.inbox, DrainWorker(is_on=True))
        wait_until(lambda: old.is_draining, "it to hear that it drains", WAIT_S)
        close(timeout_s)

    monkeypatch.setattr(old, "close", drain_then_leave)
    fleet.flip(0)
    assert worker.active.report().is_draining
    fleet.outbox.send(worker.active.process.info.inbox, DrainWorker(is_on=False))
    wait_until(lambda: not worker.active.report().is_draining, "it to take requests", WAIT_S)


def test_the_last_of_a_role_keeps_it_however_often_it_is_told(fleet: Flipping) -> None:
    fleet.flip(0)
    worker = fleet.workers[1].active
    fleet.tell(1, "decode")
    asked = fleet.directory.asked
    wait_until(lambda: asked.count("snapshot") >= 2, "it to look who else is there", WAIT_S)
    wait_until(lambda: not worker.is_changing, "it to stay", WAIT_S)
    assert fleet.role_of(1) == "prefill" and not worker.report().is_draining


def test_of_two_that_are_told_at_once_one_stays(fleet: Flipping) -> None:
    """Both say that they drain before either looks: then both stay."""
    first, second = fleet.workers[0].active, fleet.workers[1].active
    fleet.tell(0, "decode")
    fleet.tell(1, "decode")

    def is_settled() -> bool:
        return all(w.active is not None and not w.active.is_changing for w in fleet.workers)

    wait_until(lambda: fleet.directory.asked.count("snapshot") >= 2, "both to look", WAIT_S)
    wait_until(is_settled, "both to have decided", WAIT_S)
    assert "prefill" in (fleet.role_of(0), fleet.role_of(1)), (first, second)


def test_an_order_to_another_incarnation_or_for_the_same_role_changes_nothing(
    fleet: Flipping,
) -> None:
    worker = fleet.workers[0]
    worker.take_role(TakeRole("decode", "another"))
    worker.take_role(TakeRole("prefill", worker.active.process.incarnation))
    worker.take_role(TakeRole("judge", worker.active.process.incarnation))
    assert not worker.active.is_changing and fleet.role_of(0) == "prefill"


def test_a_worker_of_one_role_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, monkeypatch)
    try:
        pair.prefill.on_take_role(TakeRole("decode", pair.prefill.process.incarnation))
        assert not pair.prefill.is_changing and not pair.prefill.process.info.can_flip
    finally:
        pair.close()


def test_the_message_travels() -> None:
    message = TakeRole("decode", "1234")
    assert decode_message(encode(message)) == message


def test_tensorrt_llm_has_one_role_and_each_mistake_is_said_once() -> None:
    both = {"roles": "both", "engine": "vllm"}
    assert len(read_worker_configs("prefill", "p", both, 1)) == 3
    with pytest.raises(ConfigError, match="needs the engine torch or vllm") as said:
        read_worker_configs("prefill", "p", {"roles": "both", "engine": "tensorrt_llm"}, 1)
    with pytest.raises(ConfigError, match="kv_pages is 1") as said:
        read_worker_configs("prefill", "p", {"roles": "both", "kv_pages": "1", "slots": "0"}, 1)
    assert "has 2 mistake(s)" in str(said.value)
    with pytest.raises(ConfigError, match="unknown parameter 'slots'"):
        read_worker_configs("prefill", "p", {"slots": "4"}, 1)
