"""The bytes of an answer: server-sent events, one JSON object, or a refusal. Pure.

A stream has one event for each message of the conductor, often one per token. To save time, the
constant parts of an event are encoded once per answer. The last event with text has the finish
reason. If the client requested token counts, an event with them follows. `[DONE]` ends the stream.

    data: {"id": ..., "object": ..., "created": ..., "model": ..., "choices": [{...}]}

If the answer may have tool calls, a `CallReader` finds them in its text. Then text and the parts of
each call have events of their own, and a message whose text is held back may have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from backends.gateway.fields import CHAT
from backends.gateway.logprobs import LogprobsWriter, PieceLogprobs, joined
from backends.gateway.tool_use import CallReader
from backends.statuses import HttpRefusal
from backends.text.tool_calls.parser import CallPart, Part

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
EVENT_END = b"}\n\n"
REASON = b',"finish_reason":'
# The conductor's finish reason -> OpenAI's.
FINISH_REASONS = {"stop_word": "stop", "end_id": "stop", "length": "length"}
OBJECTS = {
    # route: (object of a stream, object of a whole answer, prefix of their ids)
    "chat": ("chat.completion.chunk", "chat.completion", "chatcmpl-"),
    "completion": ("text_completion", "text_completion", "cmpl-"),
}


class AnswerPiece(NamedTuple):
    """The part of an answer in one message of the conductor. Counts are 0 unless requested."""

    text: bytes
    finish_reason: str  # a key of FINISH_REASONS; "": more pieces follow
    output_tokens: int = 0  # tokens in this message
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: PieceLogprobs | None = None
    decision: bytes = b""  # JSON of the routing decision; b"" in most pieces, and if not requested
    token_ids: list[int] | None = None  # of this message; None unless requested, as prompt_ids
    prompt_ids: list[int] | None = None  # [] after the first message


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """The facts that all events of an answer contain."""

    route: str
    answer_id: str
    created_s: int
    model: str
    counts_each_event: bool = False  # True: each event has token counts, not only the last


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
        self,
        facts: AnswerFacts,
        includes_usage: bool,
        logprobs: LogprobsWriter | None = None,
        calls: CallReader | None = None,
    ) -> None:
        self._logprobs, self._calls = logprobs, calls
        self._has_calls = False  # the answer has had a part of a call
        self._includes_usage = includes_usage
        self._output_tokens = self._cached_tokens = self._prompt_tokens = 0
        self._is_chat = facts.route == CHAT
        self._prompt_ids = b""  # in the first event of a chat, and in its first choice otherwise
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
        # As in OpenAI's streams, the token counts are null except in the last event.
        no_usage = b',"usage":null' if includes_usage else b""
        self._between = closing + b',"logprobs":null' + REASON
        self._end = b"}]" + no_usage + EVENT_END
        self._counts_each_event = facts.counts_each_event

    def opening(self) -> bytes:
        """The event with the role, sent before the first piece of a chat; b"" in a completion."""
        if not self._is_chat:
            return b""
        choice = b'{"index":0,"delta":{"role":"assistant","content":""'
        end = self._end.removesuffix(EVENT_END) + self._prompt_ids + EVENT_END
        return self._head + choice + self._between + b"null" + end

    def event(self, piece: AnswerPiece) -> bytes:
        self._output_tokens += piece.output_tokens
        between, end = self._between, self._end
        if self._logprobs is not None and piece.logprobs is not None:
            logprobs = encode(self._logprobs.add(piece.logprobs))
            between = between.replace(b"null", logprobs, 1)
        if piece.token_ids is not None:
            between = between.removesuffix(REASON) + b',"token_ids":' + encode(piece.token_ids)
            if piece.prompt_ids:
                self._prompt_ids = b',"prompt_token_ids":' + encode(piece.prompt_ids)
                between += b"" if self._is_chat else self._prompt_ids
            between += REASON
        if self._counts_each_event or piece.finish_reason:
            self._prompt_tokens, self._cached_tokens = piece.prompt_tokens, piece.cached_tokens
        if self._counts_each_event:
            end = b'}],"usage":' + self._usage() + EVENT_END
        if piece.decision:
            end = end.removesuffix(EVENT_END) + b',"decision":' + piece.decision + EVENT_END
        if self._calls is not None:
            return self._with_calls(self._calls, piece, between, end)
        begin = self._before + encode(piece.text.decode("utf-8", "replace")) + between
        if not piece.finish_reason:
            return begin + b"null" + end
        return begin + encode(_reason(piece)) + end + self._closing()

    def _with_calls(
        self, calls: CallReader, piece: AnswerPiece, between: bytes, end: bytes
    ) -> bytes:
        """The events of a piece in a chat with tools. Logprobs, counts and the decision are in its
        last event."""
        plain = self._between + b"null" + self._end
        deltas = []
        for part in read_parts(calls, [piece]):
            self._has_calls |= isinstance(part, CallPart)
            deltas.append(_delta(part))
        has_more = between is not self._between or end is not self._end
        if piece.finish_reason or (has_more and not deltas):
            deltas.append(b'{"content":""' if not self._has_calls else b"{")
        if not deltas:
            return b""
        choice = self._head + b'{"index":0,"delta":'
        body = b"".join(choice + delta + plain for delta in deltas[:-1]) + choice + deltas[-1]
        if not piece.finish_reason:
            return body + between + b"null" + end
        reason = encode(_reason(piece, self._has_calls))
        return body + between + reason + end + self._closing()

    def _usage(self) -> bytes:
        return encode(usage(self._prompt_tokens, self._output_tokens, self._cached_tokens))

    def _closing(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return self._head + b'],"usage":' + self._usage() + EVENT_END + DONE


def read_parts(calls: CallReader, pieces: Sequence[AnswerPiece]) -> list[Part]:
    """Text and parts of calls in consecutive pieces of an answer."""
    text = b"".join(piece.text for piece in pieces).decode("utf-8", "replace")
    found = list(calls.push(text))
    return found + list(calls.finish()) if pieces[-1].finish_reason else found


def _reason(piece: AnswerPiece, has_calls: bool = False) -> str:
    """OpenAI's finish reason of an answer that ends with this piece."""
    reason = FINISH_REASONS.get(piece.finish_reason, piece.finish_reason)
    return "tool_calls" if has_calls and reason == "stop" else reason


def _delta(part: Part) -> bytes:
    """A `delta` without its closing bracket."""
    if isinstance(part, str):
        return b'{"content":' + encode(part)
    call: dict[str, object] = {"index": part.index}
    function = {"arguments": part.arguments}
    if part.name:
        call |= {"id": part.call_id, "type": "function"}
        function = {"name": part.name, **function}
    return b'{"tool_calls":' + encode([{**call, "function": function}])


def _content_and_calls(parts: Sequence[Part]) -> dict[str, object]:
    """`content` and `tool_calls` of a whole answer; `content` is None if it has only calls."""
    text = "".join(part for part in parts if isinstance(part, str))
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            continue
        if part.name:
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += part.arguments
    return {"content": text or None, "tool_calls": calls} if calls else {"content": text}


def refusal_response(refusal: HttpRefusal, more: Mapping[str, str] | None = None) -> Response:
    """A refusal in OpenAI's error format. `more`: further headers."""
    headers = dict(more or {})
    if refusal.retry_after_s:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(encode(refusal.body()), refusal.status, headers, "application/json")


def error_event(refusal: HttpRefusal) -> bytes:
    """The event for an error after the first event of a stream."""
    return b"data: " + encode(refusal.body()) + b"\n\n"


def whole(
    facts: AnswerFacts,
    pieces: list[AnswerPiece],
    logprobs: LogprobsWriter | None = None,
    calls: CallReader | None = None,
) -> bytes:
    """An answer that is not streamed."""
    of_tokens = None
    if logprobs is not None:
        of_tokens = logprobs.add(joined([each.logprobs for each in pieces if each.logprobs]))
    text = b"".join(piece.text for piece in pieces).decode("utf-8", "replace")
    last = pieces[-1]
    choice: dict[str, object] = {"index": 0}
    if facts.route == CHAT:
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if calls is not None:
            message |= _content_and_calls(read_parts(calls, pieces))
        choice["message"] = message
    else:
        choice["text"] = text
    has_calls = calls is not None and "tool_calls" in message
    choice |= {"logprobs": of_tokens, "finish_reason": _reason(last, has_calls)}
    if last.token_ids is not None:
        choice["token_ids"] = [each for piece in pieces for each in piece.token_ids or ()]
    output_tokens = sum(piece.output_tokens for piece in pieces)
    answer = {
        "id": facts.answer_id,
        "object": OBJECTS[facts.route][1],
        "created": facts.created_s,
        "model": facts.model,
        "choices": [choice],
        "usage": usage(last.prompt_tokens, output_tokens, last.cached_tokens),
    }
    if pieces[0].prompt_ids is not None:
        (answer if facts.route == CHAT else choice)["prompt_token_ids"] = pieces[0].prompt_ids
    if last.decision:
        answer["decision"] = msgspec.Raw(last.decision)
    return encode(answer)
