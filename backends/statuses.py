"""The gateway's HTTP status for each kind of error.

The first word of an error's message names the kind (errors.py). The gateway translates the kind
into a status, an error type of OpenAI's interface and a machine-readable code. The table is in
docs/reference/gateway.md, Errors. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from backends.errors import (
    CONTEXT_EXCEEDED,
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
ENSEMBLE = re.compile(r"^in ensemble '[^']*', ")  # Triton prepends this to an ensemble step's error
INTERNAL = "internal_error:"  # first word of an unexpected exception's message
CONTEXT_CODE = "context_length_exceeded"  # OpenAI's code, by which clients choose another model
NOT_THERE = (*TRITON_NEVER_PASSED_ON, GRPC_NEVER_SENT)  # parts of errors if no model was reached

TYPES = {  # HTTP status -> `type` of an error in OpenAI's interface
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
# HTTP status of a rejection that a retry cannot avoid, by kind. All other kinds have status 429.
STATUS_OF_REJECTION = {"too_large": 400}


class HttpRefusal(Exception):
    """The error response to a client."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: int = 0,
        further: Sequence[HttpRefusal] = (),
    ) -> None:
        """`code`: the machine-readable kind. `param`: the request's field that caused the error.
        `retry_after_s`: value of the header Retry-After; 0: no such header. `further`: refusals of
        the same request, whose messages are appended."""
        super().__init__(message)
        self.status, self.code = status, code
        self.message = " | ".join([message, *(each.message for each in further)])
        self.param, self.retry_after_s = param, retry_after_s
        self._further = further

    def renamed(self, rename: Callable[[str], str]) -> HttpRefusal:
        """The same refusal with other names of fields. `rename`: of a path like `tools[0].name`,
        which may also be the first word of a message."""
        param = self.param and rename(self.param)
        further = [each.renamed(rename) for each in self._further]
        own = str(self.args[0])
        path = re.split("[ :,;]", own, maxsplit=1)[0]
        own = rename(path) + own[len(path) :]
        return HttpRefusal(self.status, self.code, own, param, self.retry_after_s, further)

    @property
    def fields(self) -> frozenset[str]:
        """Names of the request's fields that caused the error, without paths into them."""
        own = re.split(r"[.\[]", self.param)[:1] if self.param else []
        return frozenset(own).union(*(each.fields for each in self._further))

    @property
    def type(self) -> str:
        return TYPES[self.status]

    def body(self) -> dict[str, object]:
        """The body in OpenAI's format."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def of_message(message: str) -> HttpRefusal:
    """The error response for an error message of Triton or of a model. Only the first word of a
    model's message decides the kind, because the rest may quote client input."""
    text = ENSEMBLE.sub("", message)
    if rejected := REJECTED.match(text):
        kind, wait_s, reason = rejected.groups()
        status = STATUS_OF_REJECTION.get(kind, 429)
        wait = retry_after_s(float(wait_s)) if status == 429 else 0
        return HttpRefusal(status, kind, reason, retry_after_s=wait)
    prefix, _, words = text.partition(" ")
    if prefix == InvalidRequest.prefix:
        is_exceeded = words.startswith(CONTEXT_EXCEEDED)
        return HttpRefusal(400, CONTEXT_CODE if is_exceeded else "invalid_request", words)
    if prefix == Forbidden.prefix:
        return HttpRefusal(403, "forbidden", words)
    if prefix in (KvMissing.prefix, WorkerUnavailable.prefix):
        code = prefix.removesuffix(":")
        if any(each in words for each in DEADLINE_WORDS):
            return HttpRefusal(504, "deadline", words)
        return HttpRefusal(503, code, words, retry_after_s=RETRY_AFTER_S_MIN)
    if prefix == Cancelled.prefix:
        return HttpRefusal(499, "cancelled", words)
    if prefix != INTERNAL and any(each in text for each in NOT_THERE):
        return unavailable(text)
    return HttpRefusal(500, "internal_error", words if prefix == INTERNAL else text)


def unavailable(message: str) -> HttpRefusal:
    """The error response while no process can serve requests. The client should retry soon."""
    return HttpRefusal(503, "unavailable", message, retry_after_s=RETRY_AFTER_S_MIN)


def retry_after_s(wait_s: float) -> int:
    """Whole seconds for the header Retry-After, 1 to RETRY_AFTER_S_MAX."""
    whole_s = math.ceil(wait_s) if math.isfinite(wait_s) else RETRY_AFTER_S_MAX
    return min(max(whole_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
