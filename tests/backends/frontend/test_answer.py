"""Responses carry what was asked for, and every way of asking gets the right set."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from backends.frontend.answer import StreamedAnswer, WholeAnswer, names_sent, not_sent
from backends.frontend.lifecycle.events import Send
from backends.frontend.request import ClientRequest
from backends.tensors import FOR_POSTPROCESSING, OF_LOGPROBS, OUTPUTS, PROMPT_OUTPUTS
from backends.text.text_stream import OutputDelta
from tests.backends.asking import ask

ALL = frozenset(output.name for output in OUTPUTS)


class Listener:
    def __init__(self, asked: frozenset[str] = ALL) -> None:
        self.outputs = asked
        self.sent: list[tuple[dict[str, np.ndarray], bool]] = []

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        self.sent.append((dict(outputs), is_final))

    def finish(self) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def is_cancelled(self) -> bool:
        return False


def messages() -> list[Send]:
    return [
        Send(OutputDelta((5,), "a"), 1, "", 64, {"prefill": "prefill_0"}),
        Send(OutputDelta((6, 7), "bc"), 2, "length", 64, {"decode_queue_s": 0.5}),
    ]


def request(**inputs: object) -> ClientRequest:
    return ask(**inputs)


def test_asking_for_nothing_gets_everything_but_what_only_postprocessing_needs() -> None:
    nobody_wants = FOR_POSTPROCESSING | {"decision", *PROMPT_OUTPUTS} | OF_LOGPROBS
    assert set(names_sent(ALL, not_sent(request()))) == ALL - nobody_wants
    with_decision = not_sent(request(return_decision=True))
    assert set(names_sent(ALL, with_decision)) == ALL - nobody_wants | {"decision"}
    with_logprobs = not_sent(request(return_log_probs=True))
    assert set(names_sent(ALL, with_logprobs)) == ALL - nobody_wants | OF_LOGPROBS
    with_prompt = not_sent(request(prompt_logprobs=0))
    assert set(names_sent(ALL, with_prompt)) == ALL - nobody_wants | set(PROMPT_OUTPUTS)


def test_whoever_asks_by_name_gets_exactly_that() -> None:
    asked = frozenset({"output_ids", "context_ids", "decision", "no_such_output"})
    assert set(names_sent(asked, not_sent(request()))) == asked & ALL


def test_a_streamed_answer_is_one_response_per_message_with_what_was_asked() -> None:
    client = Listener(frozenset({"output_ids", "finish_reason", "num_output_tokens"}))
    answer = StreamedAnswer(request(stream=True), client)
    for message in messages():
        answer.add(message)
    (first, is_first_final), (last, is_last_final) = client.sent
    assert set(first) == set(last) == client.outputs
    assert (is_first_final, is_last_final) == (False, True)
    assert first["output_ids"].tolist() == [5] and last["output_ids"].tolist() == [6, 7]
    assert first["finish_reason"][0] == b"" and last["finish_reason"][0] == b"length"
    assert last["num_output_tokens"].tolist() == [2]


def test_the_ids_of_the_prompt_are_in_the_first_response_if_they_are_named() -> None:
    asked = request(input_ids=[8, 9], stream=True)
    client = Listener(frozenset({"output_ids", "prompt_ids"}))
    streamed, whole = StreamedAnswer(asked, client), WholeAnswer(asked, client)
    for message in messages():
        streamed.add(message)
        whole.add(message)
    whole.finish()
    assert [sent["prompt_ids"].tolist() for sent, _ in client.sent] == [[8, 9], [], [8, 9]]
    assert {sent["prompt_ids"].dtype for sent, _ in client.sent} == {np.dtype(np.int32)}


def test_a_whole_answer_puts_all_messages_and_both_halves_of_the_decision_together() -> None:
    client = Listener()
    answer = WholeAnswer(request(return_decision=True), client)
    for message in messages():
        answer.add(message)
    answer.finish()
    ((only, is_final),) = client.sent
    assert is_final
    assert only["text_output"][0] == b"abc"
    assert only["num_output_tokens"].tolist() == [3]
    decision = json.loads(only["decision"][0])
    assert decision == {"prefill": "prefill_0", "decode_queue_s": 0.5}
