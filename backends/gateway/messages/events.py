"""The answer of /v1/messages, Anthropic's form: one message, or the events that build it. Pure.

message_start
  content_block_start, content_block_delta ..., content_block_stop      of each block
message_delta (why it stopped, counts of tokens), message_stop
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from backends.gateway.answer.pieces import AnswerPiece, ChoiceWriter
from backends.statuses import HttpRefusal
from backends.text.reasoning import Thought
from backends.text.tool_calls.parser import CallPart, Part

encode = msgspec.json.encode
# The conductor's finish reason -> Anthropic's.
STOP_REASONS = {"end_id": "end_turn", "stop_word": "stop_sequence", "length": "max_tokens"}
ERROR_TYPES = {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}
TEXT_KEYS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class MessageEvents:
    def __init__(
        self, message_id: str, model: str, choice: ChoiceWriter, stop_words: Sequence[str] = ()
    ) -> None:
        self._choice, self._stop_words = choice, stop_words
        self._content: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # of each block: its parts
        self._tokens = 0
        self.is_over = False
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }

    def event(self, piece: AnswerPiece) -> bytes:
        """The events of one piece."""
        self._tokens += piece.output_tokens
        body = b""
        if self._message["usage"] is None:
            self._message["usage"] = self._usage(piece)
            body = _event("message_start", message=self._message)
        for part in self._choice.push(piece):
            body += self._part(part)
        if piece.finish_reason:
            body += self._end(piece)
        return body

    def whole(self, pieces: Sequence[AnswerPiece]) -> bytes:
        for piece in pieces:
            self.event(piece)
        return encode(self._message)

    def error(self, refusal: HttpRefusal) -> bytes:
        self.is_over = True
        kind = ERROR_TYPES.get(refusal.status, "api_error")
        return _event("error", error={"type": kind, "message": refusal.message})

    def _usage(self, piece: AnswerPiece) -> dict[str, int]:
        """Anthropic counts cached tokens of the prompt apart."""
        return {
            "input_tokens": piece.prompt_tokens - piece.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": piece.cached_tokens,
            "output_tokens": self._tokens,
        }

    def _part(self, part: Thought | Part) -> bytes:
        if isinstance(part, CallPart):
            body = b""
            if part.name:
                block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
                body = self._open(block)
            return body + (self._delta(part.arguments) if part.arguments else b"")
        kind, text = ("thinking", part.text) if isinstance(part, Thought) else ("text", part)
        body = b""
        if not self._content or self._content[-1]["type"] != kind:
            block = {"type": kind, kind: ""}
            body = self._open(block | ({"signature": ""} if kind == "thinking" else {}))
        return body + self._delta(text)

    def _open(self, block: dict[str, Any]) -> bytes:
        body = self._close()
        self._content.append(block)
        self._texts.append([])
        return body + _event(
            "content_block_start", index=len(self._content) - 1, content_block=block
        )

    def _delta(self, text: str) -> bytes:
        kind = self._content[-1]["type"]
        self._texts[-1].append(text)
        delta = {"type": DELTAS[kind], TEXT_KEYS[kind]: text}
        return _event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _close(self) -> bytes:
        """End the last block, if there is one."""
        if not self._content:
            return b""
        block, text = self._content[-1], "".join(self._texts[-1])
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        return _event("content_block_stop", index=len(self._content) - 1)

    def _end(self, piece: AnswerPiece) -> bytes:
        self.is_over = True
        reason = STOP_REASONS.get(piece.finish_reason, "end_turn")
        if reason != "max_tokens" and any(each["type"] == "tool_use" for each in self._content):
            reason = "tool_use"
        body = self._close()
        # Which of several words ended the answer is not known here.
        is_word = reason == "stop_sequence" and len(self._stop_words) == 1
        stopped = {"stop_reason": reason, "stop_sequence": self._stop_words[0] if is_word else None}
        self._message |= {**stopped, "usage": self._usage(piece)}
        body += _event("message_delta", delta=stopped, usage=self._message["usage"])
        return body + _event("message_stop")


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. Other text than a JSON object is kept as {"text": ...}."""
    with suppress(msgspec.DecodeError, RecursionError):
        found = msgspec.json.decode(text or "{}")
        if isinstance(found, dict):
            return found
    return {"text": text}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"
