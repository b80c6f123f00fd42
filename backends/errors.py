"""Errors of requests: exceptions inside a process, texts between processes and to clients.

Triton's interfaces have no status for the kind of an error, such as HTTP's 429. Clients therefore
read the first word of the text: `rejected`, `invalid_request:`, `forbidden:`, `unavailable:`,
`kv_missing:` or `cancelled:`. These words are part of the interface.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Parts of Triton's error texts for a call that reached no model process.
TRITON_NEVER_PASSED_ON = (
    "unknown model", "is not ready", "is not healthy", "stopped accepting new",
)  # fmt: skip
GRPC_NEVER_SENT = "failed to connect"  # part of gRPC's error text for a call that was not sent
# Parts of gRPC's error texts for a peer whose host does not answer. If only the peer process exits,
# its host closes or resets the connection, and the text is another one.
LINK_CUT = ("timed out", "no route to host", "unreachable", "keepalive", "ping timeout")

# Parts of our error texts. The first: the client's `timeout_ms` has passed. The second: the
# deadline for further attempts has passed.
TIMEOUT_PASSED, DEADLINE_PASSED = "its timeout of", "its deadline has passed"
DEADLINE_WORDS = (TIMEOUT_PASSED, DEADLINE_PASSED)


# Begin of the error for a request that exceeds the model's context. Clients recognise these words
# of OpenAI.
CONTEXT_EXCEEDED = "This model's maximum context length is"


class ServingError(Exception):
    """Base class of errors that end an attempt to serve a request. The frontend retries some."""

    prefix = "error:"

    def wire_message(self) -> str:
        return f"{self.prefix} {self}"


class Overloaded(ServingError):
    """The request is rejected, for example because of load, a full queue or a tenant's limit."""

    def __init__(self, kind: str, reason: str, retry_after_s: float) -> None:
        """`kind`: a machine-readable reason. `retry_after_s`: seconds until a retry may succeed."""
        super().__init__(reason)
        self.kind = kind
        self.retry_after_s = retry_after_s

    def wire_message(self) -> str:
        return f"rejected kind={self.kind} retry_after_s={self.retry_after_s:.2f}: {self}"


class InvalidRequest(ServingError):
    """The request is invalid; the message lists all problems."""

    prefix = "invalid_request:"

    def __init__(self, problems: Sequence[str] | str) -> None:
        found = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(" | ".join(found))


class Forbidden(ServingError):
    """API keys are configured, and the request has no key, has an unproven or removed tenant, or
    did not come from the gateway."""

    prefix = "forbidden:"


class WorkerUnavailable(ServingError):
    """A worker failed, or the request's deadline passed."""

    prefix = "unavailable:"


class WorkerGone(WorkerUnavailable):
    """The worker was dead before the call, is restarting, or is shutting down. The failed attempt
    does not count towards the request's limit of failures (`attempts_max`)."""

    prefix = "unavailable: gone:"


class WrongRole(WorkerGone):
    """The worker's role, prefill or decode, is not that of the call, or the role is changing."""

    prefix = "unavailable: role:"


class WorkerUnreached(WorkerGone):
    """This host cannot connect to the worker, or the connection was cut."""


class WorkerRefused(WorkerUnreached):
    """TLS failed, because this host or the worker's Triton rejected the other's certificate."""


class WorkerDistrusts(WorkerRefused):
    """The worker has another secret (launch_secret.py) than the caller. Only a restart changes a
    secret, so the frontend does not probe the worker."""

    prefix = "unavailable: distrusts:"


class StoreLost(WorkerUnavailable):
    """The directory or the worker's storage node failed."""

    prefix = "unavailable: store:"


class MessagesLost(WorkerUnavailable):
    """Tokens that a worker sent did not arrive."""


class KvMissing(ServingError):
    """The decode worker needs KV blocks that were evicted, are corrupt, or were on a dead node."""

    prefix = "kv_missing:"


class Cancelled(ServingError):
    """The client disconnected or cancelled the request."""

    prefix = "cancelled:"


class ConfigError(Exception):
    """A config.pbtxt is invalid. The message lists all mistakes, each with its remedy. The model
    does not load, or keeps its previous settings if it was loaded before."""


# (kind, seconds, reason) in the wire message of an Overloaded.
REJECTED = re.compile(r"rejected kind=(\S+) retry_after_s=([0-9.]+): (.*)", re.DOTALL)


def from_wire(message: str, where: str) -> ServingError:
    """The error of a failed call to a model. `message`: Triton's error text, which contains the
    model's wire message somewhere. `where`: the model's name."""
    if rejected := REJECTED.search(message):
        return Overloaded(rejected.group(1), rejected.group(3), float(rejected.group(2)))
    kinds = (
        InvalidRequest,
        KvMissing,
        Cancelled,
        WorkerGone,
        WrongRole,
        WorkerDistrusts,
        StoreLost,
    )
    for kind in kinds:
        if kind.prefix in message:
            return kind(message.split(kind.prefix, 1)[1].strip())
    if any(words in message for words in TRITON_NEVER_PASSED_ON):
        return WorkerGone(f"{where}: {message}")
    return WorkerUnavailable(f"{where}: {message}")


def from_broken_call(where: str, code: object, details: str | None) -> WorkerUnavailable:
    """The error of a call whose connection failed. WorkerUnreached: the call was not sent, or the
    peer's host did not answer. WorkerUnavailable: any other failure, because the request itself may
    have crashed the worker."""
    text = (details or "").lower()
    is_cut = "UNAVAILABLE" in str(code) and any(words in text for words in LINK_CUT)
    is_unreached = is_cut or GRPC_NEVER_SENT in text
    return (WorkerUnreached if is_unreached else WorkerUnavailable)(f"{where}: {code} {details}")
