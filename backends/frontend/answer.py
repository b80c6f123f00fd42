"""Messages of a request as responses: one each for a stream, or all in one.

A response has the outputs that its client asked for, because Triton takes each tensor of every
message into its hands. Not here: what is in a message (attempt.py), the table of outputs
(tensors.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from backends.frontend.attempt import Message
from backends.frontend.cluster_view import Served
from backends.frontend.request import FrontRequest, Limits
from backends.frontend.worker_calls import as_text
from backends.tensors import FOR_POSTPROCESSING, OUTPUTS
from backends.text.text_stream import Emission, merge


class Client(Protocol):
    """The answer stream of one request (triton_io.Reply)."""

    outputs: frozenset[str]  # names that the client asked for

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None: ...
    def finish(self) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def is_cancelled(self) -> bool: ...


class StreamedAnswer:
    """One response per message."""

    def __init__(self, request: FrontRequest, client: Client) -> None:
        self._prompt_tokens = len(request.prompt_ids)
        self._client = client
        self._names = names_sent(client.outputs, request.wants_decision)
        self._wants_decision = request.wants_decision

    def add(self, message: Message) -> None:
        if not self._wants_decision:
            message.decision = None
        self._client.send(
            outputs(message, self._prompt_tokens, self._names), bool(message.finish_reason)
        )

    def finish(self) -> None:
        self._client.finish()


class WholeAnswer:
    """Everything in exactly one response, which /generate insists on."""

    def __init__(self, request: FrontRequest, client: Client) -> None:
        self._request = request
        self._client = client
        self._messages: list[Message] = []

    def add(self, message: Message) -> None:
        self._messages.append(message)

    def finish(self) -> None:
        request = self._request
        whole = merge([message.emission for message in self._messages])
        if request.includes_prompt:
            whole = with_prompt(request, whole)
        decision: dict[str, object] = {}
        for message in self._messages:
            decision |= message.decision or {}
        last = self._messages[-1]
        message = Message(
            whole,
            sum(each.output_tokens for each in self._messages),
            last.finish_reason,
            last.cached_tokens,
            decision if request.wants_decision else None,
        )
        names = names_sent(self._client.outputs, request.wants_decision)
        self._client.send(outputs(message, len(request.prompt_ids), names), is_final=True)


def with_prompt(request: FrontRequest, emission: Emission) -> Emission:
    """The emission with the prompt in front (exclude_input_in_output explicitly false)."""
    text = request.prompt_text + emission.text
    return Emission(
        token_ids=(*request.prompt_ids.tolist(), *emission.token_ids),
        text=text,
        cut_bytes=-1 if emission.cut_bytes < 0 else len(text.encode()),
        is_stopped=emission.is_stopped,
    )


def names_sent(asked: frozenset[str], wants_decision: bool) -> tuple[str, ...]:
    """The outputs to send, in the order of the table.

    To Triton, asking for nothing is asking for everything. Then what only `postprocessing` needs
    is left out, and `decision` unless the request wants one. An ensemble asks by name, for less
    than everything, and must get all of it in every response.
    """
    names = [output.name for output in OUTPUTS]
    if asked.issuperset(names):
        left_out = FOR_POSTPROCESSING if wants_decision else FOR_POSTPROCESSING | {"decision"}
        return tuple(name for name in names if name not in left_out)
    return tuple(name for name in names if name in asked)


EMPTY = as_text(b"")
ZERO = np.zeros(1, np.int32)

# name of an output -> its value, from a message and the length of the prompt
_VALUES: dict[str, Callable[[Message, int], np.ndarray]] = {
    "text_output": lambda message, _: as_text(message.emission.text.encode()),
    "output_ids": lambda message, _: np.array(message.emission.token_ids, np.int32),
    "context_ids": lambda message, _: np.array(message.emission.context_ids, np.int32),
    "text_cut_bytes": lambda message, _: np.array([message.emission.cut_bytes], np.int32),
    "num_input_tokens": lambda _, prompt_tokens: np.array([prompt_tokens], np.int32),
    "num_output_tokens": lambda message, _: np.array([message.output_tokens], np.int32),
    "cached_tokens": lambda message, _: np.array([message.cached_tokens], np.int32),
    "finish_reason": lambda message, _: (
        as_text(message.finish_reason.encode()) if message.finish_reason else EMPTY
    ),
    "decision": lambda message, _: (
        as_text(json.dumps(message.decision).encode()) if message.decision else EMPTY
    ),
    "batch_index": lambda *_: ZERO,
    "sequence_index": lambda *_: ZERO,
}


def outputs(message: Message, prompt_tokens: int, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The tensors of one response."""
    return {name: _VALUES[name](message, prompt_tokens) for name in names}


def describe(served: Served, limits: Limits, asked: frozenset[str]) -> dict[str, np.ndarray]:
    """What is served, as JSON in text_output: for load generators and people."""
    facts = {
        "block_tokens": served.block_tokens,
        "context_tokens_max": served.context_tokens_max,
        "vocabulary_tokens": limits.vocabulary_tokens,
        "workers": list(served.workers),
        "fingerprint": served.fingerprint,
    }
    message = Message(Emission((), json.dumps(facts)), 0, "described")
    return outputs(message, 0, names_sent(asked, wants_decision=False))
