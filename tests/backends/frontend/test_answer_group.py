"""Several answers to one prompt in the frontend: one prefill, one client, and no answer lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from backends.engine.sampling_params import SEED_MAX
from backends.errors import Cancelled, KvMissing, Overloaded, WorkerUnavailable
from backends.frontend.answer import AnswerGroup
from backends.frontend.lifecycle.events import Unwanted
from backends.frontend.lifecycle.machine import Phase
from backends.frontend.request import answers_wanted
from backends.tensors import ANSWERS_MAX
from backends.workers.protocol import DecodeRequest, FirstToken
from tests.backends.asking import array, refusal
from tests.backends.frontend.test_live_request import ANSWER, Case, reject


@dataclass
class Client:
    """Remembers responses as (answer, is_final)."""

    outputs: frozenset[str] = frozenset({"output_ids", "sequence_index"})
    sent: list[tuple[int, bool]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    finished: int = 0
    is_gone: bool = False

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        assert not any(final for _, final in self.sent), "a response after the last one"
        self.sent.append((int(outputs["sequence_index"][0]), is_final))

    def finish(self) -> None:
        self.finished += 1

    def fail(self, error: Exception) -> None:
        self.errors.append(error)

    def is_cancelled(self) -> bool:
        return self.is_gone


MESSAGE = {"sequence_index": np.zeros(1, np.int32)}


def test_only_the_last_response_of_the_last_answer_is_final(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        client, answers = Client(), rng.randint(2, 5)
        group = AnswerGroup(client, answers)
        left = {index: rng.randint(1, 4) for index in range(answers)}
        while left:
            index = rng.choice(list(left))
            left[index] -= 1
            stream = group.streams[index]
            stream.send(MESSAGE, is_final=not left[index])
            if not left[index]:
                del left[index]
                stream.finish()
        assert [final for _, final in client.sent].count(True) == 1 and client.sent[-1][1]
        assert {index for index, _ in client.sent} == set(range(answers)) and client.finished == 1


def test_responses_from_several_threads_end_with_the_final_one() -> None:
    client = Client()
    group = AnswerGroup(client, 8)

    def answer(index: int) -> None:
        for number in range(50):
            group.streams[index].send(MESSAGE, is_final=number == 49)

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(client.sent) == 400 and client.sent[-1][1]


def test_an_error_of_one_answer_is_sent_once_and_ends_the_others() -> None:
    client = Client()
    group = AnswerGroup(client, 3)
    first, second, third = group.streams
    first.send(MESSAGE, is_final=True)
    second.fail(WorkerUnavailable("down"))
    third.fail(WorkerUnavailable("down, too"))
    third.send(MESSAGE)
    assert [str(error) for error in client.errors] == ["down"] and len(client.sent) == 1
    assert third.is_cancelled() and not client.is_gone


def test_a_client_that_left_is_gone_for_each_answer() -> None:
    client = Client(is_gone=True)
    assert all(stream.is_cancelled() for stream in AnswerGroup(client, 2).streams)


# ---- requests that share a prefill


def test_answers_share_the_prefill_and_decode_by_their_own_seeds() -> None:
    case = Case({}, copies=3, seed=SEED_MAX)
    assert case.run() == ANSWER
    [prefill] = case.prefills
    assert prefill.copies == ["copy0-1", "copy1-1", "copy2-1"]
    decodes = [body for body in case.calls.bodies if isinstance(body, DecodeRequest)]
    seeds = {body.request_id: body.sampling.seed for body in decodes}
    assert seeds == {"r-1": SEED_MAX, "copy0-1": 0, "copy1-1": 1, "copy2-1": 2}
    assert [client.ids for client in case.copy_clients] == [ANSWER] * 3
    assert [request.is_prefilled for request in case.cluster.asked] == [False, True, True, True]
    assert sorted(case.cluster.finished_ids) == sorted(seeds) and not case.cluster.released


def test_where_the_engine_samples_one_token_of_a_prompt_each_answer_has_its_own_prefill() -> None:
    case = Case({}, copies=2)
    case.calls.samples_copies = False
    assert case.run() == ANSWER and len(case.prefills) == 3
    assert [client.ids for client in case.copy_clients] == [ANSWER] * 2
    assert not any(request.is_prefilled for request in case.cluster.asked)


@pytest.mark.parametrize("worker", ["prefill_0", "decode_0"])
def test_a_lost_attempt_costs_no_answer(worker: str) -> None:
    losses = [KvMissing("gone"), KvMissing("gone")]
    case = Case({worker: [*losses]}, copies=2)
    assert case.run() == ANSWER
    assert [client.ids for client in case.copy_clients] == [ANSWER] * 2
    first, *others = case.prefills
    assert first.copies == ["copy0-1", "copy1-1"]
    is_begun = worker == "decode_0"  # the copies have begun, and each is routed again alone
    assert all(bool(body.copies) != is_begun for body in others)


def test_a_prompt_that_is_rejected_begins_no_copy() -> None:
    case = Case({}, decisions=[reject("ttft_slo")], copies=2)
    error = case.error()
    assert isinstance(error, Overloaded)
    assert [copy.state.phase for copy in case.copies] == [Phase.READING] * 2
    for copy, client in zip(case.copies, case.copy_clients, strict=True):
        client.is_gone = True  # as in an AnswerGroup after an error
        copy.look(0.0, 0.0)
        assert copy.state.phase is Phase.DONE
    assert not case.cluster.released


def test_a_copy_that_is_too_large_lets_go_of_the_blocks_that_are_leased_to_it() -> None:
    case = Case({}, decisions=[None, reject("too_large")], copies=1)
    case.run()
    assert case.cluster.released == ["copy0-1"]
    [error] = case.copy_clients[0].ends
    assert isinstance(error, Overloaded)


def test_a_copy_whose_client_left_before_it_was_routed_lets_go_of_its_blocks() -> None:
    case = Case({}, copies=1)
    [copy], [client] = case.copies, case.copy_clients
    while not copy._given:
        work, arguments = case.works.popleft()
        work(*arguments)
    client.is_gone = True
    copy.look(0.0, 0.0)
    case.run()
    assert case.cluster.released == ["copy0-1"] and not client.ids


@pytest.mark.parametrize(
    ("value", "answers"), [(1, 1), (4, 4), (ANSWERS_MAX, ANSWERS_MAX), (0, 1), (ANSWERS_MAX + 1, 1)]
)
def test_the_number_of_answers_is_read_before_the_rest(value: int, answers: int) -> None:
    inputs = {"num_return_sequences": array("num_return_sequences", value)}
    assert answers_wanted(inputs, {}) == answers
    assert answers_wanted(inputs, {"describe": True}) == 1
    assert answers_wanted({}, {}) == 1


def test_a_number_of_answers_out_of_range_is_refused_with_its_limits() -> None:
    for value in (0, ANSWERS_MAX + 1):
        said = refusal(num_return_sequences=value)
        assert f"num_return_sequences is {value}; use 1 to {ANSWERS_MAX}" in said


def test_after_its_first_token_a_lost_prefill_is_not_shared_again() -> None:
    """A further attempt samples the second token, which is not the first token of a copy."""
    case = Case({"prefill_0": [KvMissing("gone")]}, copies=2, on_call=lambda model: begin(model))

    def begin(model: str) -> None:
        if model == "prefill_0" and not case.client.ids:
            case.request.first_token(1, FirstToken("r-1", ANSWER[0], 0))

    assert case.run() == ANSWER
    assert [client.ids for client in case.copy_clients] == [ANSWER] * 2
    shared, *alone = case.prefills
    assert shared.copies and not any(body.copies for body in alone)


@pytest.mark.parametrize("kind", ["no_decode_worker", "token_rate"])
def test_a_copy_that_finds_no_room_for_a_moment_waits_as_an_admitted_request_does(
    kind: str,
) -> None:
    case = Case({}, decisions=[None, reject(kind), reject(kind)], copies=1)
    assert case.run() == ANSWER and case.copy_clients[0].ids == ANSWER
    assert case.cluster.released == ["copy0-1"], "of the prefill that was shared"


def test_the_first_answer_asks_for_room_for_all() -> None:
    case = Case({}, copies=3)
    case.run()
    assert [request.answers for request in case.cluster.asked] == [4, 1, 1, 1]


def test_a_prefill_that_is_given_up_releases_the_blocks_of_copies_too() -> None:
    case = Case({}, copies=2)
    leave = lambda model: case.request.post(Unwanted(Cancelled("gone")))  # noqa: E731
    case.calls.on_call = leave
    case.run()
    assert case.cluster.released == ["r-1", "copy0-1", "copy1-1"]
