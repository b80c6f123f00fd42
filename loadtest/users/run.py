"""One run in one process: the state that its users share, and how a request becomes a record.

A new run is a new object, so no state survives a run. Every process of a run counts seconds from
the same moment, so record times need no shift when a worker sends them to its master.

In Locust's statistics `total` is the whole request. `TTFT` and `TBT` of the same request have lines
of their own, outside "Aggregated", because they are no further requests. A rejection is a request
without a response time, on a line per kind, and no failure.

Not here: beginning and ending a run (session.py), what to send (workloads.py, trace_share.py), when
(users.py), exact numbers and limits (verdict.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from gevent import GreenletExit

from loadtest.client.answer import ReceivedAnswer, record_of
from loadtest.client.protocol import GenerateRequest, ServerError, TokenEvent
from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord
from loadtest.users.settings import LoadSettings
from loadtest.users.tenants import UserIdentity, number_among_parts, tenant_of
from loadtest.users.text import ServerFacts
from loadtest.users.trace_share import DataSetShare, TraceProgress, TraceShare

TOTAL, TTFT, TBT, REJECTION = "total", "TTFT", "TBT", "rejected"


class RunClock:
    """Seconds since a run began; the wall clock is read once, then the monotonic clock."""

    def __init__(self, began_unix_s: float) -> None:
        self.began_unix_s = began_unix_s
        self._offset_s = time.time() - time.perf_counter() - began_unix_s

    def now_s(self) -> float:
        return time.perf_counter() + self._offset_s


class RequestSender(Protocol):
    """The connection that users send through (senders.py)."""

    def send(self, request: GenerateRequest, timeout_s: float) -> Iterator[TokenEvent]:
        """Raises ServerError. Closing the iterator early cancels the request."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outgoing:
    request: GenerateRequest
    workload: str  # name that it is counted under
    prompt_tokens: int  # an estimate for a text prompt, until the server reports its count
    due_s: float | None = None  # None: due when it is sent
    index: int = 0


def send_one(
    sender: RequestSender, outgoing: Outgoing, timeout_s: float, now_s: Callable[[], float]
) -> tuple[RequestRecord, ReceivedAnswer]:
    """Send a request; every end is a record, except cancellation, which raises."""
    answer, error = ReceivedAnswer(), None
    sent_s = now_s()
    try:
        for event in sender.send(outgoing.request, timeout_s):
            answer.add(event)
    except ServerError as server_error:
        error = server_error
    record = record_of(
        answer,
        error,
        outgoing.request,
        due_s=sent_s if outgoing.due_s is None else outgoing.due_s,
        sent_s=sent_s,
        finished_s=now_s(),
        prompt_tokens=answer.input_tokens or outgoing.prompt_tokens,
        index=outgoing.index,
        workload=outgoing.workload,
    )
    return record, answer


class RunMessage(msgspec.Struct, frozen=True):
    """A message in MessagePack inside Locust's own messages."""

    run_id: str

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpacked(cls, data: bytes) -> Any:
        return msgspec.msgpack.decode(data, type=cls)


class RunBeginning(RunMessage, frozen=True):
    """The master's description of a run for its workers."""

    began_unix_s: float
    facts: ServerFacts
    parts: list[str]  # ids of workers with a part of a trace or data set; later workers have none


class RunReport(RunMessage, frozen=True):
    """A worker's addition to Locust's reports: its records since the last report."""

    records: list[RequestRecord]
    cancelled: int
    trace: TraceProgress | None = None
    is_last: bool = False  # the users of this worker have stopped


class RunRecords:
    """Every request that ended by itself, and the number of requests that the run's end cut off."""

    def __init__(self) -> None:
        self.all: list[RequestRecord] = []
        self.cancelled = 0

    def take(self) -> tuple[list[RequestRecord], int]:
        taken = self.all, self.cancelled
        self.all, self.cancelled = [], 0
        return taken

    def merge(self, report: RunReport) -> None:
        self.all += report.records
        self.cancelled += report.cancelled

    def in_order(self, keep_index: bool) -> list[RequestRecord]:
        """Records by due time, numbered in this order unless `keep_index` keeps a trace's rows."""
        ordered = sorted(self.all, key=lambda record: (record.due_s, record.request_id))
        if keep_index:
            return ordered
        return [dataclasses.replace(record, index=i) for i, record in enumerate(ordered)]


@dataclass(slots=True)
class UserRun:
    run_id: str
    settings: LoadSettings
    facts: ServerFacts
    clock: RunClock
    sender: RequestSender
    environment: Any  # Locust's
    process_name: str = ""  # "" alone, the worker's number in a distributed run
    part: int = 0  # number of this process among the `parts` processes that share the users
    parts: int = 1
    trace: TraceShare | None = None
    data_sets: Mapping[str, DataSetShare] = field(default_factory=dict)
    records: RunRecords = field(default_factory=RunRecords)
    _users: Counter[str] = field(default_factory=Counter)

    @property
    def is_explained(self) -> bool:
        """Whether requests ask for the conductor's decision; only the report shows it."""
        return self.settings.report is not None

    def identify(self, workload: str) -> UserIdentity:
        """The next user of this workload here; equal settings give equal users."""
        # Each workload begins with another tenant, so few users of several workloads have several
        # tenants.
        mix = self.settings.mix
        place = list(mix).index(workload) if workload in mix else 0
        number = number_among_parts(
            self._users[workload], self.part, self.parts, list(mix.values())
        )
        tenant = tenant_of(self.settings.tenants, place + number)
        self._users[workload] += 1
        return UserIdentity(workload, f"{self.process_name}{self._users[workload]}", tenant)

    def send(self, outgoing: Outgoing) -> tuple[RequestRecord, ReceivedAnswer]:
        try:
            record, answer = send_one(
                self.sender, outgoing, self.settings.request_s_max, self.clock.now_s
            )
        except GreenletExit:  # the run and its grace are over
            self.records.cancelled += 1
            raise
        self.records.all.append(record)
        count(self.environment, record, len(answer.text.encode()))
        return record, answer

    def report(self, is_last: bool = False) -> RunReport:
        trace = self.trace.progress() if self.trace is not None else None
        return RunReport(self.run_id, *self.records.take(), trace, is_last)


class RequestFailed(Exception):
    """The text of a failed request in Locust's list of failures."""


def count(environment: Any, record: RequestRecord, answer_bytes: int) -> None:
    """Add a record to the statistics of Locust's `environment`."""
    is_rejected, is_done = record.outcome == REJECTED, record.outcome == COMPLETED
    failure = None if is_done else RequestFailed(f"{record.kind}: {record.message}")
    environment.events.request.fire(
        request_type=REJECTION if is_rejected else TOTAL,
        name=f"{record.workload} {record.kind}" if is_rejected else record.workload,
        response_time=None if is_rejected else record.latency_s * 1e3,
        response_length=answer_bytes,
        exception=None if is_rejected else failure,
        context={},
    )
    for kind, value_s in ((TTFT, record.ttft_s), (TBT, record.tbt_s)):
        if is_done and value_s is not None:
            environment.stats.entries[(record.workload, kind)].log(value_s * 1e3, 0)
