"""Responses to the client: one for each message of a stream, or a single response.

A response contains only the outputs that the client requested, because each tensor costs Triton
time in every response. `decision` (decisions/fields.py) is one of the outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from backends.frontend.cluster_view import Served
from backends.frontend.lifecycle.events import Send
from backends.frontend.request import ClientRequest, RequestLimits
from backends.tensors import FOR_POSTPROCESSING, OF_LOGPROBS, OUTPUTS, PROMPT_OUTPUTS, string_tensor
from backends.text.text_stream import OutputDelta, merge
from backends.token_logprobs import PromptLogprobs


class ReplyStream(Protocol):
    """The response stream of one request (triton_io.Reply)."""

    outputs: frozenset[str]  # outputs that the client named; all if the client named none

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None: ...
    def finish(self) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def is_cancelled(self) -> bool: ...


class AnswerGroup:
    """The responses of several answers to one prompt, on the response stream of one request.

    An error of one answer ends the others. Thread-safe.
    """

    def __init__(self, client: ReplyStream, answers: int) -> None:
        self._client, self.outputs = client, client.outputs
        self._lock = threading.Lock()  # held while sending, so that the last response is final
        self._open = set(range(answers))  # answers whose last response was not sent
        self._is_failed = False
        self.streams: Sequence[ReplyStream] = [_OfGroup(self, index) for index in range(answers)]

    def send(self, index: int, values: Mapping[str, np.ndarray], is_final: bool) -> None:
        if "sequence_index" in values:
            values = {**values, "sequence_index": np.array([index], np.int32)}
        with self._lock:
            if is_final:
                self._open.discard(index)
            if not self._is_failed:
                self._client.send(values, is_final and not self._open)

    def finish(self, index: int) -> None:
        with self._lock:
            self._open.discard(index)
            if not self._open:
                self._client.finish()

    def fail(self, error: Exception) -> None:
        with self._lock:
            if not self._is_failed:
                self._is_failed = True
                self._client.fail(error)

    def is_cancelled(self) -> bool:
        return self._is_failed or self._client.is_cancelled()


class _OfGroup:
    """The response stream of one answer."""

    def __init__(self, group: AnswerGroup, index: int) -> None:
        self._group, self._index = group, index
        self.outputs = group.outputs

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        self._group.send(self._index, outputs, is_final)

    def finish(self) -> None:
        self._group.finish(self._index)

    def fail(self, error: Exception) -> None:
        self._group.fail(error)

    def is_cancelled(self) -> bool:
        return self._group.is_cancelled()


class AnsweredPrompt(NamedTuple):
    """The prompt of a response."""

    token_ids: np.ndarray  # int32
    logprobs: PromptLogprobs = PromptLogprobs()
    is_sent: bool = False  # True in the first response, which alone has the outputs of the prompt


class StreamedAnswer:
    """One response per message."""

    # Set before the first message, which alone has them. The late reply of an abandoned attempt may
    # set them again.
    prompt_logprobs = PromptLogprobs()

    def __init__(self, request: ClientRequest, client: ReplyStream) -> None:
        self._prompt = AnsweredPrompt(request.prompt_ids)
        self._client = client
        self._names = names_sent(client.outputs, not_sent(request))
        self._is_begun = False

    def add(self, message: Send) -> None:
        prompt = self._prompt
        if not self._is_begun:
            prompt = prompt._replace(logprobs=self.prompt_logprobs, is_sent=True)
        self._is_begun = True
        self._client.send(outputs(message, prompt, self._names), bool(message.finish_reason))

    def finish(self) -> None:
        self._client.finish()


class WholeAnswer:
    """Collects the messages and sends one response, because /generate allows only one."""

    prompt_logprobs = PromptLogprobs()

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
        prompt = AnsweredPrompt(request.prompt_ids, self.prompt_logprobs, is_sent=True)
        self._client.send(outputs(message, prompt, names), is_final=True)


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
    left_out = set(FOR_POSTPROCESSING)
    if not request.wants_decision:
        left_out.add("decision")
    if not request.sampling.wants_logprobs:
        left_out |= OF_LOGPROBS
    if not request.sampling.scores_prompt:
        left_out.update(PROMPT_OUTPUTS)
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

# name of an output -> function of (message, prompt) that makes the output's value
_VALUES: dict[str, Callable[[Send, AnsweredPrompt], np.ndarray]] = {
    "text_output": lambda message, _: string_tensor(message.delta.text.encode()),
    "output_ids": lambda message, _: np.array(message.delta.token_ids, np.int32),
    "context_ids": lambda message, _: np.array(message.delta.context_ids, np.int32),
    "text_cut_bytes": lambda message, _: np.array([message.delta.cut_bytes], np.int32),
    "num_input_tokens": lambda _, prompt: np.array([len(prompt.token_ids)], np.int32),
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
    "prompt_ids": lambda _, prompt: prompt.token_ids if prompt.is_sent else NO_IDS,
    "prompt_log_probs": lambda _, prompt: np.frombuffer(prompt.logprobs.log_probs, np.float32),
    "prompt_ranks": lambda _, prompt: np.frombuffer(prompt.logprobs.ranks, np.int32),
    "prompt_top_token_ids": lambda _, prompt: _rows(prompt, prompt.logprobs.top_ids, np.int32),
    "prompt_top_log_probs": lambda _, prompt: _rows(
        prompt, prompt.logprobs.top_log_probs, np.float32
    ),
}


def _matrix(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    """An array with one row per token and one column per likeliest token; may be 0 in size."""
    return np.array(rows, dtype).reshape(len(rows), len(rows[0]) if rows else 0)


def _rows(prompt: AnsweredPrompt, raw: bytes, dtype: type) -> np.ndarray:
    """An array with one row per token of the prompt; may be 0 in size."""
    rows = len(prompt.token_ids) if prompt.logprobs.ranks else 0
    return np.frombuffer(raw, dtype).reshape(rows, -1 if rows else 0)


def outputs(message: Send, prompt: AnsweredPrompt, names: Iterable[str]) -> dict[str, np.ndarray]:
    return {name: _VALUES[name](message, prompt) for name in names}


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
    left_out = FOR_POSTPROCESSING | OF_LOGPROBS | {"decision", *PROMPT_OUTPUTS}
    return outputs(message, AnsweredPrompt(NO_IDS), names_sent(asked, left_out))
