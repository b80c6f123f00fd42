"""Every error that a client or an operator sees from Triton.

* ServingError
  x Overloaded        retry later             -> UNAVAILABLE, says retry_after_s
  x InvalidRequest    fix the request         -> INVALID_ARG
  x Forbidden         with API keys: nobody says so but the client -> INVALID_ARG
  x WorkerUnavailable a worker died or failed; the frontend goes on elsewhere first
    x WorkerGone      it was not there: dead before the call, starting again, or shutting down
      x WorkerUnreached there is no way to it: no connection, or its link was cut
        x WorkerRefused it does not let this host in: keys, or certificates
          x WorkerDistrusts its secret is another one: until one of the two begins anew
      x WrongRole       it has the other role, for now or by now
    x StoreLost       the directory or the worker's storage node did not do its part
    x MessagesLost    tokens that were sent did not arrive
  x KvMissing         blocks of a request left the store; they are computed again first
  x Cancelled         the client went away or asked to stop; nobody reads the answer
* ConfigError         fix config.pbtxt        -> the model does not load, the old one goes on

Triton has no 429: clients tell errors apart by the first word of the message, which is part of
the interface (`rejected`, `invalid_request:`, `forbidden:`, `unavailable:`, `cancelled:`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Triton's own words for a call that no model process has seen.
TRITON_NEVER_PASSED_ON = ("unknown model", "is not ready", "is not healthy")
GRPC_NEVER_SENT = "failed to connect"  # gRPC's
# gRPC's too, of a connection whose other end says nothing any more; one whose other end has died
# is closed or reset.
LINK_CUT = ("timed out", "no route to host", "unreachable", "keepalive", "ping timeout")

# What the last word of a request says that its deadline ended: its timeout_ms, or request_s_max.
TIMEOUT_PASSED, DEADLINE_PASSED = "its timeout of", "its deadline has passed"
DEADLINE_WORDS = (TIMEOUT_PASSED, DEADLINE_PASSED)


class ServingError(Exception):
    """Base of what a request may fail with."""

    prefix = "error:"

    def wire_message(self) -> str:
        return f"{self.prefix} {self}"


class Overloaded(ServingError):
    """Rejected early: no pair of workers would meet the SLO (or there is no worker)."""

    def __init__(self, kind: str, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.kind = kind
        self.retry_after_s = retry_after_s

    def wire_message(self) -> str:
        return f"rejected kind={self.kind} retry_after_s={self.retry_after_s:.2f}: {self}"


class InvalidRequest(ServingError):
    """The request breaks limits; lists all of them."""

    prefix = "invalid_request:"

    def __init__(self, problems: Sequence[str] | str) -> None:
        found = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(" | ".join(found))


class Forbidden(ServingError):
    """With API keys: the request comes without a key, or its tenant is not proven."""

    prefix = "forbidden:"


class WorkerUnavailable(ServingError):
    """A worker died or failed, and no other could take over."""

    prefix = "unavailable:"


class WorkerGone(WorkerUnavailable):
    """The request never was at this worker, or it is leaving: no fault of the request's."""

    prefix = "unavailable: gone:"


class WrongRole(WorkerGone):
    """The worker has the other role, or is just changing: another one is asked."""

    prefix = "unavailable: role:"


class WorkerUnreached(WorkerGone):
    """There is no way from here to the worker, whatever is asked of it."""


class WorkerRefused(WorkerUnreached):
    """Keys: the worker's Triton does not let this host in, or is not believed."""


class WorkerDistrusts(WorkerRefused):
    """The worker knows another secret than who calls it. Both read theirs when they start, so that
    no probe finds out whether it has changed."""

    prefix = "unavailable: distrusts:"


class StoreLost(WorkerUnavailable):
    """The directory, or the storage node of the worker, did not do its part."""

    prefix = "unavailable: store:"


class MessagesLost(WorkerUnavailable):
    """Tokens that a worker sent did not arrive."""


class KvMissing(ServingError):
    """Blocks that a decode worker should load are gone (evicted, or their node died)."""

    prefix = "kv_missing:"


class Cancelled(ServingError):
    """The request was stopped on demand."""

    prefix = "cancelled:"


class ConfigError(Exception):
    """Mistakes in a config.pbtxt, all of them, each with its remedy."""


# (kind, seconds, reason) of what an Overloaded says on the wire.
REJECTED = re.compile(r"rejected kind=(\S+) retry_after_s=([0-9.]+): (.*)", re.DOTALL)


def from_wire(message: str, where: str) -> ServingError:
    """The error that another model sent, as the class that it was; `where` names the model."""
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
    """The connection of a call failed. What was never sent, and what a cut link took away, is no
    fault of the request's; a worker that closed its end may have died of it."""
    said = (details or "").lower()
    is_cut = "UNAVAILABLE" in str(code) and any(words in said for words in LINK_CUT)
    is_unreached = is_cut or GRPC_NEVER_SENT in said
    return (WorkerUnreached if is_unreached else WorkerUnavailable)(f"{where}: {code} {details}")
