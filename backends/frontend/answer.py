"""Responses to the client: one for each message of a stream, or a single response.

A response contains only the outputs that the client requested, because each tensor costs Triton
time in every response. `decision` (decisions/fields.py) is one of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Protocol

import msgspec
import numpy as np

from backends.frontend.cluster_view import Served
from backends.frontend.lifecycle.events import Send
from backends.frontend.request import ClientRequest, RequestLimits
from backends.tensors import OF_LOGPROBS, OUTPUTS, SENT_IF_NAMED, string_tensor
from backends.text.text_stream import OutputDelta, merge


class ReplyStream(Protocol):
    """The response stream of one request (triton_io.Reply)."""

    outputs: frozenset[str]  # outputs that the client named; all if the client named none

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None: ...
    def finish(self) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def is_cancelled(self) -> bool: ...


class StreamedAnswer:
    """One response per message."""

    def __init__(self, request: ClientRequest, client: ReplyStream) -> None:
        self._prompt_ids, self._prompt_tokens = request.prompt_ids, len(request.prompt_ids)
        self._client = client
        self._names = names_sent(client.outputs, not_sent(request))

    def add(self, message: Send) -> None:
        found = outputs(message, self._prompt_tokens, self._names)
        if "prompt_ids" in found:
            found["prompt_ids"], self._prompt_ids = self._prompt_ids, self._prompt_ids[:0]
        self._client.send(found, bool(message.finish_reason))

    def finish(self) -> None:
        self._client.finish()


class WholeAnswer:
    """Collects the messages and sends one response, because /generate allows only one."""

    def __init__(self, request: ClientRequest, client: ReplyStream) -> None:
        self._request = request
        self._client = client
        self._messages: list[Send] = []

    def add(self, message: Send) -> None:
        self._messages.append(message)

    def finish(self) -> None:
        request = self._request
        whole = merge([message.delta for message in self._messages])
        if request.includes_prompt:
            whole = with_prompt(request, whole)
        fields: dict[str, object] = {}
        for message in self._messages:
            fields |= message.fields
        last = self._messages[-1]
        output_tokens = sum(each.output_tokens for each in self._messages)
        message = Send(whole, output_tokens, last.finish_reason, last.cached_tokens, fields)
        names = names_sent(self._client.outputs, not_sent(request))
        found = outputs(message, len(request.prompt_ids), names)
        if "prompt_ids" in found:
            found["prompt_ids"] = request.prompt_ids
        self._client.send(found, is_final=True)


def with_prompt(request: ClientRequest, delta: OutputDelta) -> OutputDelta:
    """The delta with the prompt before it (for exclude_input_in_output false)."""
    text = request.prompt_text + delta.text
    return OutputDelta(
        token_ids=(*request.prompt_ids.tolist(), *delta.token_ids),
        text=text,
        cut_bytes=-1 if delta.cut_bytes < 0 else len(text.encode()),
        is_stopped=delta.is_stopped,
        logprobs=delta.logprobs,  # of generated tokens only; prompt tokens have none
    )


def not_sent(request: ClientRequest) -> Set[str]:
    """Outputs that a client does not get if it names no outputs."""
    left_out = set(SENT_IF_NAMED)
    if not request.wants_decision:
        left_out.add("decision")
    if not request.sampling.wants_logprobs:
        left_out |= OF_LOGPROBS
    return left_out


def names_sent(asked: frozenset[str], left_out: Set[str]) -> tuple[str, ...]:
    """The outputs to send, in the order of OUTPUTS.

    `asked`: outputs that Triton requests, which are all outputs if the client names none. In that
    case the outputs in `left_out` are not sent. If the client or an ensemble names outputs, each of
    them is sent in every response, perhaps empty.
    """
    names = [output.name for output in OUTPUTS]
    if asked.issuperset(names):
        return tuple(name for name in names if name not in left_out)
    return tuple(name for name in names if name in asked)


EMPTY = string_tensor(b"")
ZERO, NO_IDS = np.zeros(1, np.int32), np.zeros(0, np.int32)

# name of an output -> function of (message, tokens of the prompt) that makes the output's value
_VALUES: dict[str, Callable[[Send, int], np.ndarray]] = {
    "text_output": lambda message, _: string_tensor(message.delta.text.encode()),
    "output_ids": lambda message, _: np.array(message.delta.token_ids, np.int32),
    "prompt_ids": lambda *_: NO_IDS,  # replaced in the first response
    "context_ids": lambda message, _: np.array(message.delta.context_ids, np.int32),
    "text_cut_bytes": lambda message, _: np.array([message.delta.cut_bytes], np.int32),
    "num_input_tokens": lambda _, prompt_tokens: np.array([prompt_tokens], np.int32),
    "num_output_tokens": lambda message, _: np.array([message.output_tokens], np.int32),
    "cached_tokens": lambda message, _: np.array([message.cached_tokens], np.int32),
    "finish_reason": lambda message, _: (
        string_tensor(message.finish_reason.encode()) if message.finish_reason else EMPTY
    ),
    "decision": lambda message, _: (
        string_tensor(msgspec.json.encode(message.fields)) if message.fields else EMPTY
    ),
    "batch_index": lambda *_: ZERO,
    "sequence_index": lambda *_: ZERO,
    "output_log_probs": lambda message, _: np.array(
        [each.log_prob for each in message.delta.logprobs], np.float32
    ),
    "top_token_ids": lambda message, _: _matrix(
        [each.top_ids for each in message.delta.logprobs], np.int32
    ),
    "top_log_probs": lambda message, _: _matrix(
        [each.top_log_probs for each in message.delta.logprobs], np.float32
    ),
}


def _matrix(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    """An array with one row per token and one column per likeliest token; may be 0 in size."""
    return np.array(rows, dtype).reshape(len(rows), len(rows[0]) if rows else 0)


def outputs(message: Send, prompt_tokens: int, names: Iterable[str]) -> dict[str, np.ndarray]:
    return {name: _VALUES[name](message, prompt_tokens) for name in names}


def describe(
    served: Served,
    limits: RequestLimits,
    unreached: Mapping[str, tuple[str, str]],
    asked: frozenset[str],
) -> dict[str, np.ndarray]:
    """The service's properties as JSON in text_output, for load generators and operators."""
    facts = {
        "block_tokens": served.block_tokens,
        "context_tokens_max": served.context_tokens_max,
        "vocabulary_tokens": limits.vocabulary_tokens,
        "workers": list(served.workers),
        "unreached_workers": {name: error for name, (_, error) in unreached.items()},
        "fingerprint": served.fingerprint,
    }
    return described(facts, asked)


def described(facts: Mapping[str, object], asked: frozenset[str]) -> dict[str, np.ndarray]:
    """A response with `facts` as JSON in text_output."""
    text = msgspec.json.encode(facts).decode()
    message = Send(OutputDelta((), text), 0, "described", 0)
    left_out = SENT_IF_NAMED | OF_LOGPROBS | {"decision"}
    return outputs(message, 0, names_sent(asked, left_out))
