"""One HTTP status for each kind of error: the table that the gateway answers by.

A client of Triton reads the kind as the first word of a message (errors.py), because Triton's HTTP
has no status of its own for it; behind the gateway the same kind is a status, a type in OpenAI's
words and a code for machines. Pure.

| kind | status | type |
|---|---|---|
| `invalid_request`; `rejected kind=too_large` | 400 | `invalid_request_error` |
| no key, or one that nobody has | 401 | `authentication_error` |
| `forbidden`; a tenant that the key does not stand for | 403 | `permission_error` |
| a path or a model that is not there | 404 | `not_found_error` |
| a method that the path does not have | 405 | `invalid_request_error` |
| a request that comes too slowly | 408 | `invalid_request_error` |
| too large a body | 413 | `invalid_request_error` |
| every other `rejected` | 429, with `Retry-After` | `rate_limit_error` |
| `cancelled` by somebody else than the client | 499 | `cancelled_error` |
| `internal_error`, and what has no known kind | 500 | `server_error` |
| `unavailable`, `kv_missing`, Triton away, draining | 503 | `unavailable_error` |
| `unavailable` because the deadline has passed | 504 | `timeout_error` |
"""

from __future__ import annotations

import math
import re

from backends.errors import (
    DEADLINE_WORDS,
    GRPC_NEVER_SENT,
    REJECTED,
    TRITON_NEVER_PASSED_ON,
    Cancelled,
    Forbidden,
    InvalidRequest,
    KvMissing,
    WorkerUnavailable,
)

RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1, 3600
ENSEMBLE = re.compile(r"^in ensemble '[^']*', ")
INTERNAL = "internal_error:"
NOT_THERE = (*TRITON_NEVER_PASSED_ON, GRPC_NEVER_SENT)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}
# Kinds of rejection that no waiting helps: the request itself has to change.
STATUS_OF_REJECTION = {"too_large": 400}


class HttpRefusal(Exception):
    """What a client gets instead of an answer."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: int = 0
    ) -> None:
        """`code`: the kind, for machines; `param`: the field of the request that it is about;
        `retry_after_s`: 0: no such header."""
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after_s = param, retry_after_s

    @property
    def type(self) -> str:
        return TYPES[self.status]

    def body(self) -> dict[str, object]:
        """In OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def of_message(message: str) -> HttpRefusal:
    """What Triton or one of our models said, as a status; `param` is for whoever asked to find.

    Only its beginning decides: the rest may quote what the client sent.
    """
    said = ENSEMBLE.sub("", message)
    if rejected := REJECTED.match(said):
        kind, wait_s, reason = rejected.groups()
        status = STATUS_OF_REJECTION.get(kind, 429)
        wait = retry_after_s(float(wait_s)) if status == 429 else 0
        return HttpRefusal(status, kind, reason, retry_after_s=wait)
    prefix, _, words = said.partition(" ")
    if prefix == InvalidRequest.prefix:
        return HttpRefusal(400, "invalid_request", words)
    if prefix == Forbidden.prefix:
        return HttpRefusal(403, "forbidden", words)
    if prefix in (KvMissing.prefix, WorkerUnavailable.prefix):
        code = prefix.removesuffix(":")
        if any(each in words for each in DEADLINE_WORDS):
            return HttpRefusal(504, "deadline", words)
        return HttpRefusal(503, code, words, retry_after_s=RETRY_AFTER_S_MIN)
    if prefix == Cancelled.prefix:
        return HttpRefusal(499, "cancelled", words)
    if prefix != INTERNAL and any(each in said for each in NOT_THERE):
        return unavailable(said)
    return HttpRefusal(500, "internal_error", words if prefix == INTERNAL else said)


def unavailable(message: str) -> HttpRefusal:
    """Nothing serves it now, and something may in a moment."""
    return HttpRefusal(503, "unavailable", message, retry_after_s=RETRY_AFTER_S_MIN)


def retry_after_s(wait_s: float) -> int:
    """Whole seconds, as the header wants them; at least one, so that nobody comes back at once."""
    whole_s = math.ceil(wait_s) if math.isfinite(wait_s) else RETRY_AFTER_S_MAX
    return min(max(whole_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
