"""The response of /v1/responses: one object, or the events that build it. Pure.

The output is a list of items: the reasoning, messages, and function calls. In a stream, each item
and each part of its content is announced, grows, and ends:

    response.created, response.in_progress
      response.output_item.added
        response.content_part.added                                  of reasoning and messages
          response.reasoning_text.delta, response.output_text.delta,
          response.function_call_arguments.delta                     for each new part of the text
          ... .done
        response.content_part.done
      response.output_item.done
    response.completed, response.incomplete or response.failed

Events are numbered from 0. An item that is cut off by `max_output_tokens` is incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from backends.gateway.answer.chat_events import FINISH_REASONS
from backends.gateway.answer.pieces import AnswerPiece, ChoiceWriter, thinking_tokens
from backends.gateway.request.infer_request import TEMPERATURE
from backends.gateway.responses.items import item_id
from backends.gateway.responses.request import ResponsesRequest
from backends.statuses import HttpRefusal
from backends.text.reasoning import ThinkingReader, Thought
from backends.text.tool_calls.parser import CallPart, Part

encode = msgspec.json.encode
IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
RATE_LIMIT, SERVER_ERROR = "rate_limit_exceeded", "server_error"  # codes of a failed response
# Type of an item -> names of the events for its text.
TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}
Body = dict[str, Any]


def new_response(wanted: ResponsesRequest, response_id: str, created_s: int, model: str) -> Body:
    """The response before its output."""
    given = wanted.given
    reasoning = given.get("reasoning", {})
    text = {"format": {"type": "text"}, **given.get("text", {})}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "status": IN_PROGRESS,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": given.get("max_tool_calls"),
        "metadata": given.get("metadata", {}),
        "model": model,
        "output": [],
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": wanted.previous_id or None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": wanted.is_stored,
        "temperature": given.get("temperature", TEMPERATURE),
        "text": text,
        "tool_choice": _choice(given.get("tool_choice", "auto")),
        "tools": [_tool(each["function"]) for each in given.get("tools", ())],
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": given.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": given.get("user"),
    }


def _tool(function: Mapping[str, Any]) -> Body:
    return {"type": "function", "parameters": {}, "strict": False, **function}


def _choice(value: Any) -> Any:
    if isinstance(value, dict):
        return {"type": "function", "name": value["function"]["name"]}
    return value


class ResponseEvents:
    """The events of one response. `response` is its state, and the whole response at the end."""

    def __init__(self, response: Body, choice: ChoiceWriter) -> None:
        self.response, self._choice = response, choice
        self._output: list[Body] = response["output"]
        self._texts: list[str] = []  # of the last item, which grows
        self._sequence = 0
        self._tokens = 0
        self._logprobs: list[Any] = []  # of text that is held back
        self._is_open = False  # the last item grows
        self._is_whole = False  # events are not sent
        self.is_over = False

    def event(self, piece: AnswerPiece) -> bytes:
        """The events of one piece."""
        body = b"" if self._sequence else self._begin()
        self._tokens += piece.output_tokens
        was_thinking = self._is_thinking()
        parts = self._choice.push(piece)
        self._add_logprobs(piece, was_thinking)
        for part in parts:
            body += self._part(part)
        if piece.finish_reason:
            body += self._end(piece)
        return body

    def whole(self, pieces: Sequence[AnswerPiece]) -> bytes:
        self._is_whole = True
        for piece in pieces:
            self.event(piece)
        return encode(self.response)

    def error(self, refusal: HttpRefusal) -> bytes:
        self.is_over = True
        code = RATE_LIMIT if refusal.status == 429 else SERVER_ERROR
        error = {"code": code, "message": refusal.message}
        self._finish_text()
        self.response |= {"status": FAILED, "error": error}
        return self._event("response.failed", response=self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        if self._is_whole:
            return b""
        data = encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _begin(self) -> bytes:
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def _is_thinking(self) -> bool:
        reader = self._choice.reader
        return isinstance(reader, ThinkingReader) and not reader.is_answering

    def _add_logprobs(self, piece: AnswerPiece, was_thinking: bool) -> None:
        """Hold the logprobs of a piece for the next text. Drop the logprobs of the thinking."""
        if self._choice.logprobs is None or piece.logprobs is None:
            return
        self._logprobs += self._choice.logprobs.add(piece.logprobs)["content"]
        reader = self._choice.reader
        if was_thinking and isinstance(reader, ThinkingReader) and reader.has_thought:
            self._logprobs = []

    def _part(self, part: Thought | Part) -> bytes:
        if isinstance(part, CallPart):
            return self._call_part(part)
        if isinstance(part, Thought):
            return self._text_part("reasoning", part.text)
        logprobs, self._logprobs = self._logprobs, []
        return self._text_part("message", part, logprobs=logprobs)

    def _text_part(self, kind: str, text: str, **more: list[Any]) -> bytes:
        """`more`: the logprobs of a message's text."""
        body = b""
        if not (self._is_open and self._output[-1]["type"] == kind):
            body = self._close() + self._open_text(kind)
        self._texts.append(text)
        for name, values in more.items():
            self._output[-1]["content"][0][name] += values
        name = f"{TEXT_EVENTS[kind]}.delta"
        return body + self._event(name, **self._place(), content_index=0, delta=text, **more)

    def _call_part(self, part: CallPart) -> bytes:
        body = b""
        if part.name:
            self._logprobs = []
            body = self._close()
            item = {
                "type": "function_call",
                "id": self._new_id("fc"),
                "call_id": part.call_id,
                "name": part.name,
                "arguments": "",
                "status": IN_PROGRESS,
            }
            body += self._added(item)
        if part.arguments:
            self._texts.append(part.arguments)
            name = f"{TEXT_EVENTS['function_call']}.delta"
            body += self._event(name, **self._place(), delta=part.arguments)
        return body

    def _open_text(self, kind: str) -> bytes:
        if kind == "reasoning":
            item: Body = {"type": kind, "id": self._new_id("rs"), "summary": []}
            part: Body = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": kind, "id": self._new_id("msg"), "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item |= {"status": IN_PROGRESS, "content": []}
        body = self._added(item)
        item["content"].append(part)
        return body + self._event(
            "response.content_part.added", **self._place(), content_index=0, part=part
        )

    def _new_id(self, prefix: str) -> str:
        return item_id(prefix, self.response["id"], len(self._output))

    def _added(self, item: Body) -> bytes:
        self._output.append(item)
        self._is_open, self._texts = True, []
        index = len(self._output) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _place(self) -> Body:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _finish_text(self) -> str:
        """Write the text of the last item into it."""
        text = "".join(self._texts)
        if self._output and self._output[-1]["type"] == "function_call":
            self._output[-1]["arguments"] = text
        elif self._output:
            self._output[-1]["content"][0]["text"] = text
        return text

    def _close(self, status: str = COMPLETED) -> bytes:
        """End the item that grows, if there is one."""
        if not self._is_open:
            return b""
        text = self._finish_text()
        self._is_open = False
        item, place = self._output[-1], self._place()
        item["status"] = status
        name = f"{TEXT_EVENTS[item['type']]}.done"
        if item["type"] == "function_call":
            body = self._event(name, **place, arguments=text)
        else:
            part = item["content"][0]
            place["content_index"] = 0
            given = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            body = self._event(name, **place, text=text, **given)
            body += self._event("response.content_part.done", **place, part=part)
        index = place["output_index"]
        return body + self._event("response.output_item.done", output_index=index, item=item)

    def _end(self, piece: AnswerPiece) -> bytes:
        self.is_over = True
        is_cut = FINISH_REASONS.get(piece.finish_reason) == "length"
        body = b"" if self._output else self._open_text("message")
        if self._is_open and self._output[-1]["type"] == "message":
            self._output[-1]["content"][0]["logprobs"] += self._logprobs
        status = INCOMPLETE if is_cut else COMPLETED
        body += self._close(status)
        details = {"reason": "max_output_tokens"} if is_cut else None
        self.response |= {"status": status, "incomplete_details": details}
        self.response["usage"] = {
            "input_tokens": piece.prompt_tokens,
            "input_tokens_details": {"cached_tokens": piece.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": thinking_tokens([self._choice]) or 0},
            "total_tokens": piece.prompt_tokens + self._tokens,
        }
        return body + self._event(f"response.{status}", response=self.response)
