"""Errors of requests, as exceptions in one process and as text between processes and to clients.

Triton's interfaces have no status 429. Clients read the first word: `rejected`, `invalid_request:`,
`forbidden:`, `unavailable:`, `kv_missing:` or `cancelled:`. These words are part of the interface.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Triton's error texts for a call that reached no model process.
TRITON_NEVER_PASSED_ON = ("unknown model", "is not ready", "is not healthy")
GRPC_NEVER_SENT = "failed to connect"  # gRPC's error text for a call that was not sent
# gRPC's texts for a peer that does not answer. A peer process that exits closes or resets the
# connection instead.
LINK_CUT = ("timed out", "no route to host", "unreachable", "keepalive", "ping timeout")

# Texts that mark a deadline error: TIMEOUT_PASSED for the client's timeout_ms, DEADLINE_PASSED for
# request_s_max.
TIMEOUT_PASSED, DEADLINE_PASSED = "its timeout of", "its deadline has passed"
DEADLINE_WORDS = (TIMEOUT_PASSED, DEADLINE_PASSED)


class ServingError(Exception):
    """Base class of errors that end an attempt; the frontend retries some."""

    prefix = "error:"

    def wire_message(self) -> str:
        return f"{self.prefix} {self}"


class Overloaded(ServingError):
    """Rejected by the conductor, a limit of the frontend or tenant, or a full worker or storage
    node."""

    def __init__(self, kind: str, reason: str, retry_after_s: float) -> None:
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
    """With API keys: no key, an unverified tenant claim, a tenant that was removed, or a caller
    that is not the gateway."""

    prefix = "forbidden:"


class WorkerUnavailable(ServingError):
    """A worker failed, or the request's deadline passed."""

    prefix = "unavailable:"


class WorkerGone(WorkerUnavailable):
    """The worker was absent: dead before the call, restarting, or shutting down. The loss does not
    count against the request."""

    prefix = "unavailable: gone:"


class WrongRole(WorkerGone):
    """The worker has the other role, or is changing its role."""

    prefix = "unavailable: role:"


class WorkerUnreached(WorkerGone):
    """The worker cannot be reached from this host: the connection failed, or was cut."""


class WorkerRefused(WorkerUnreached):
    """The worker's Triton rejected this host's certificate, or this host rejected the Triton's
    certificate."""


class WorkerDistrusts(WorkerRefused):
    """Worker and caller have different secrets. Only a restart changes a secret, so the frontend
    does not probe this worker."""

    prefix = "unavailable: distrusts:"


class StoreLost(WorkerUnavailable):
    """The directory, or the storage node of the worker, failed."""

    prefix = "unavailable: store:"


class MessagesLost(WorkerUnavailable):
    """Tokens that a worker sent did not arrive."""


class KvMissing(ServingError):
    """Blocks that a decode worker needs are not in the store (evicted, or their node died)."""

    prefix = "kv_missing:"


class Cancelled(ServingError):
    """The client disconnected or cancelled the request."""

    prefix = "cancelled:"


class ConfigError(Exception):
    """A config.pbtxt is invalid; the message lists all mistakes, each with its remedy. The model
    does not load. A model that is already loaded keeps its settings."""


# (kind, seconds, reason) in the wire message of an Overloaded.
REJECTED = re.compile(r"rejected kind=(\S+) retry_after_s=([0-9.]+): (.*)", re.DOTALL)


def from_wire(message: str, where: str) -> ServingError:
    """The error in the wire message of another model; `where` names the model. The prefix may be
    anywhere in `message`, because Triton may prepend text."""
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
    """The error of a call whose connection failed. A call that was not sent, or whose peer did not
    answer, is WorkerUnreached. If the connection was closed, the result is WorkerUnavailable: the
    request may have crashed the worker."""
    text = (details or "").lower()
    is_cut = "UNAVAILABLE" in str(code) and any(words in text for words in LINK_CUT)
    is_unreached = is_cut or GRPC_NEVER_SENT in text
    return (WorkerUnreached if is_unreached else WorkerUnavailable)(f"{where}: {code} {details}")
