"""What a client is sent: an answer as server-sent events or as one object, or a refusal. Pure.

A stream costs one event a token, so what does not change of it is written once and an event is put
together from bytes. The last one with text says how the answer ended; then the counts, where the
client wants them, and `[DONE]`.

    data: {"id": ..., "object": ..., "created": ..., "model": ..., "choices": [{...}]}

Not here: reading the conductor's responses (frontend_calls.py), sending (generation.py), which
status a refusal has (backends/statuses.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from backends.gateway.fields import CHAT
from backends.gateway.logprobs import LogprobsWriter, PieceLogprobs, joined
from backends.statuses import HttpRefusal

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
EVENT_END = b"}\n\n"
# OpenAI's words for why an answer ended.
FINISH_REASONS = {"stop_word": "stop", "end_id": "stop", "length": "length"}
OBJECTS = {
    # route: of a stream, of a whole answer, and what their ids begin with
    "chat": ("chat.completion.chunk", "chat.completion", "chatcmpl-"),
    "completion": ("text_completion", "text_completion", "cmpl-"),
}


class AnswerPiece(NamedTuple):
    """What one message of the conductor adds to an answer."""

    text: bytes
    finish_reason: str  # the conductor's; "": more is to come
    output_tokens: int = 0  # of this message
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: PieceLogprobs | None = None
    decision: bytes = b""  # JSON, of who asked for it; more than one piece may have a part


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What all events of an answer say."""

    route: str
    answer_id: str
    created_s: int
    model: str
    counts_each_event: bool = False  # of a stream; not only at its end


def finish_reason(word: str) -> str:
    return FINISH_REASONS.get(word, word)


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class EventStream:
    """The events of one answer, as bytes."""

    def __init__(
        self, facts: AnswerFacts, includes_usage: bool, logprobs: LogprobsWriter | None = None
    ) -> None:
        self._logprobs = logprobs
        self._includes_usage = includes_usage
        self._output_tokens = self._cached_tokens = self._prompt_tokens = 0
        self._is_chat = facts.route == CHAT
        head = {
            "id": facts.answer_id,
            "object": OBJECTS[facts.route][0],
            "created": facts.created_s,
            "model": facts.model,
        }
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        inner = b'"delta":{"content":' if self._is_chat else b'"text":'
        self._before = self._head + b'{"index":0,' + inner
        closing = b"}" if self._is_chat else b""
        # The counts of a stream are null but in its last event, as OpenAI sends them.
        no_usage = b',"usage":null' if includes_usage else b""
        self._between = closing + b',"logprobs":null,"finish_reason":'
        self._end = b"}]" + no_usage + EVENT_END
        self._counts_each_event = facts.counts_each_event

    def opening(self) -> bytes:
        """Before the first piece: in a chat, who speaks."""
        if not self._is_chat:
            return b""
        said = b'{"index":0,"delta":{"role":"assistant","content":""'
        return self._head + said + self._between + b"null" + self._end

    def event(self, piece: AnswerPiece) -> bytes:
        self._output_tokens += piece.output_tokens
        between, end = self._between, self._end
        if self._logprobs is not None and piece.logprobs is not None:
            said = encode(self._logprobs.add(piece.logprobs))
            between = between.replace(b"null", said, 1)
        if self._counts_each_event or piece.finish_reason:
            self._prompt_tokens, self._cached_tokens = piece.prompt_tokens, piece.cached_tokens
        if self._counts_each_event:
            end = b'}],"usage":' + self._usage() + EVENT_END
        if piece.decision:
            end = end.removesuffix(EVENT_END) + b',"decision":' + piece.decision + EVENT_END
        begin = self._before + encode(piece.text.decode("utf-8", "replace")) + between
        if not piece.finish_reason:
            return begin + b"null" + end
        return begin + encode(finish_reason(piece.finish_reason)) + end + self._closing()

    def _usage(self) -> bytes:
        return encode(usage(self._prompt_tokens, self._output_tokens, self._cached_tokens))

    def _closing(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return self._head + b'],"usage":' + self._usage() + EVENT_END + DONE


def refusal_response(refusal: HttpRefusal, more: Mapping[str, str] | None = None) -> Response:
    """In OpenAI's shape. `more` headers than its status wants."""
    headers = dict(more or {})
    if refusal.retry_after_s:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(encode(refusal.body()), refusal.status, headers, "application/json")


def error_event(refusal: HttpRefusal) -> bytes:
    """After the first event there is no status any more."""
    return b"data: " + encode(refusal.body()) + b"\n\n"


def whole(
    facts: AnswerFacts, pieces: list[AnswerPiece], logprobs: LogprobsWriter | None = None
) -> bytes:
    """An answer that is not streamed."""
    of_tokens = None
    if logprobs is not None:
        of_tokens = logprobs.add(joined([each.logprobs for each in pieces if each.logprobs]))
    text = b"".join(piece.text for piece in pieces).decode("utf-8", "replace")
    last = pieces[-1]
    choice: dict[str, object] = {"index": 0}
    if facts.route == CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    choice |= {"logprobs": of_tokens, "finish_reason": finish_reason(last.finish_reason)}
    output_tokens = sum(piece.output_tokens for piece in pieces)
    answer = {
        "id": facts.answer_id,
        "object": OBJECTS[facts.route][1],
        "created": facts.created_s,
        "model": facts.model,
        "choices": [choice],
        "usage": usage(last.prompt_tokens, output_tokens, last.cached_tokens),
    }
    if last.decision:
        answer["decision"] = msgspec.Raw(last.decision)
    return encode(answer)
