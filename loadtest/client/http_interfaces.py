"""Requests and responses over HTTP, for Triton's own interface or OpenAI's.

In both, one POST is answered by server-sent events, so one sender does for both: under gevent
users/senders.py, under asyncio sse_client.py. Pure translation: bytes in, events and errors out;
the time is an argument.

OpenAI's events carry text, not token ids, and the last one counts the tokens. Each event counts as
one token. Tokens of the final count beyond that came several in a message, and are added at the
end. TBT does not depend on where such tokens are added, because their intervals are zero. OpenAI's
interface does not carry a conductor's decision.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest.client.protocol import (
    GenerateRequest,
    Rejected,
    ServerError,
    TokenEvent,
    json_body,
    parse_json,
    server_error,
)

JSON = {"Content-Type": "application/json"}
EVENT_STREAM = "text/event-stream"
DATA, DONE = b"data:", b"[DONE]"
SHOWN_CHARACTERS_MAX = 500
INCOMPLETE = "the stream ended before the answer did: no finish reason came, or no [DONE]"
NEVER_ENDS = -1  # as `end_id`
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TENANT = "tenant"
RETRY_AFTER_S = 1.0  # of a rejection without a Retry-After
# By status, where the code of OpenAI's error is none of ours.
KINDS = {401: "forbidden", 403: "forbidden", 500: "server_error", 504: "timeout"}
OWN_KINDS = ("invalid_request", "forbidden", "unavailable", "kv_missing")
NO_KEY = "put a key into OPENAI_API_KEY (for Locust's tenants: --tenant-keys FILE)"


@dataclass(frozen=True, slots=True)
class PostedRequest:
    path: str
    headers: dict[str, str]
    body: bytes


def data_of(line: bytes) -> bytes | None:
    """The data of a line; None for comments, other fields and the lines between events."""
    return line[len(DATA) :].strip() if line.startswith(DATA) else None


def shown(body: bytes) -> str:
    return body.decode(errors="replace").strip()[:SHOWN_CHARACTERS_MAX]


def decoded(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(slots=True)
class TritonReader:
    """Reads the events of one answer; `is_finished`: the answer is complete."""

    is_finished: bool = False

    def read(self, data: bytes, time_s: float) -> TokenEvent | None:
        """The event after `data:`; None for an event without content. Raises ServerError."""
        found = decoded(data)
        if found is None:
            raise server_error(shown(data))
        event = parse_json(found, time_s)
        self.is_finished = self.is_finished or bool(event.finish_reason)
        return event


@dataclass(frozen=True, slots=True)
class TritonInterface:
    """`generate_stream` of one model. A refusal has status 400 with {"error": ...}."""

    model: str

    def posted(self, request: GenerateRequest) -> PostedRequest:
        path = f"/v2/models/{self.model}/generate_stream"
        return PostedRequest(path, dict(JSON), json_body(request))

    def reader(self) -> TritonReader:
        return TritonReader()

    def refusal(self, status: int, retry_after: str, body: bytes) -> ServerError:
        """The error of a response that is no event stream; `retry_after`: the header, or ""."""
        said = decoded(body) or {}
        return server_error(str(said.get("error") or f"HTTP status {status}: {shown(body)}"))


@dataclass(slots=True)
class OpenAiReader:
    is_finished: bool = False
    _tokens: int = 0  # tokens in the events so far
    _ends: str = ""  # finish reason, once received
    _last_s: float = 0.0  # time of the last text

    def read(self, data: bytes, time_s: float) -> TokenEvent | None:
        if data == DONE:
            self.is_finished = bool(self._ends)
            return None
        said = decoded(data)
        if said is None:
            raise ServerError("server_error", f"an event is no JSON: {shown(data)}")
        if "error" in said:
            raise error_of(0, "", said)
        choices = said.get("choices")
        if isinstance(choices, list) and choices:
            return self._text(choices[0], time_s)
        return self._counts(said.get("usage"), time_s)

    def _text(self, choice: Mapping[str, Any], time_s: float) -> TokenEvent | None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        reason = choice.get("finish_reason") or ""
        self._ends = self._ends or reason
        # The role comes before the first token; the finish reason may come after the last one.
        if not text and (reason or "role" in delta):
            return TokenEvent(time_s, finish_reason=reason) if reason else None
        self._tokens += 1
        self._last_s = time_s
        return TokenEvent(time_s, text=text, finish_reason=reason, tokens=1)

    def _counts(self, usage: object, time_s: float) -> TokenEvent | None:
        if not isinstance(usage, dict):
            return None
        details = usage.get("prompt_tokens_details") or {}
        missing = (usage.get("completion_tokens") or 0) - self._tokens
        return TokenEvent(
            self._last_s or time_s,
            tokens=max(0, missing),
            input_tokens=usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
        )


@dataclass(frozen=True, slots=True)
class OpenAiInterface:
    """`keys`: API key of each tenant that has one; `key`: of all others, "" for none. A tenant with
    an API key is identified by it; one without is named in the request."""

    path: str = COMPLETIONS
    model: str = ""  # "": the first served model
    key: str = field(default="", repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    def posted(self, request: GenerateRequest) -> PostedRequest:
        headers = dict(JSON)
        if request.request_id.isprintable():
            headers["X-Request-Id"] = request.request_id
        tenant = str(request.parameters.get(TENANT, ""))
        if key := self.keys.get(tenant, self.key):
            headers["Authorization"] = f"Bearer {key}"
        body = dict(self._fields(request))
        if tenant and not key:
            body[TENANT] = tenant
        return PostedRequest(self.path, headers, json.dumps(body).encode())

    def _fields(self, request: GenerateRequest) -> Iterator[tuple[str, Any]]:
        if self.model:
            yield "model", self.model
        yield from self._prompt(request)
        for name in ("max_tokens", "min_tokens", "top_k", "top_p", "seed"):
            if (value := getattr(request, name)) is not None:
                yield name, value
        # The conductor is greedy by default, OpenAI's interface is not.
        wants_sampling = request.top_k is not None or request.top_p is not None
        default = 1.0 if wants_sampling else 0.0
        yield "temperature", default if request.temperature is None else request.temperature
        assert request.end_id in (None, NEVER_ENDS), "OpenAI's interface names no end token"
        if request.end_id == NEVER_ENDS:
            yield "ignore_eos", True
        if request.priority:
            yield "priority", request.priority
        assert request.parameters.keys() <= {TENANT}, "parameters of Triton's interface"
        yield "stream", True
        yield "stream_options", {"include_usage": True}

    def _prompt(self, request: GenerateRequest) -> Iterator[tuple[str, Any]]:
        if self.path == CHAT:
            assert request.input_ids is None, "a chat is no token ids"
            alone = ({"role": "user", "content": request.text_input or ""},)
            yield "messages", list(request.messages or alone)
        elif request.input_ids is not None:
            yield "prompt", np.asarray(request.input_ids).reshape(-1).tolist()
        else:
            yield "prompt", request.text_input

    def reader(self) -> OpenAiReader:
        return OpenAiReader()

    def refusal(self, status: int, retry_after: str, body: bytes) -> ServerError:
        said = decoded(body)
        if said is None or not isinstance(said.get("error"), dict):
            what = f"HTTP status {status}, and no error as OpenAI's interface has them"
            return ServerError("server_error", f"{what}: {shown(body)}")
        return error_of(status, retry_after, said)


HttpInterface = TritonInterface | OpenAiInterface


def error_of(status: int, retry_after: str, said: Mapping[str, Any]) -> ServerError:
    """The error that the server reported. `status` 0: in an event of a stream that had begun."""
    error = said["error"] if isinstance(said["error"], dict) else {"message": said["error"]}
    code, message = str(error.get("code") or ""), str(error.get("message") or error)
    if status == 429 or error.get("type") == "rate_limit_error":
        return Rejected(code or "rate_limit", message, seconds(retry_after))
    if code == "too_large":  # waiting does not help: the request itself has to change
        return Rejected(code, message, 0.0)
    if status == 401:
        message = f"{message}; {NO_KEY}"
    kind = KINDS.get(status, "invalid_request" if 400 <= status < 499 else "server_error")
    if code == "deadline":
        kind = "timeout"
    return ServerError(code if code in OWN_KINDS else kind, message)


def seconds(retry_after: str) -> float:
    """Seconds of the header; a date, which is also valid there, counts as the least time."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return RETRY_AFTER_S
