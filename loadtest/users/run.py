"""One run in one process: what its users share. A new run is a new object, so nothing stays behind.

Not here: beginning and ending it (session.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gevent import GreenletExit

from loadtest.client.answer import StreamedAnswer
from loadtest.replay.prompts import TokenSource
from loadtest.replay.trace import TraceRow
from loadtest.results.metrics import RequestRecord
from loadtest.users import statistics
from loadtest.users.records import Parcel, Records
from loadtest.users.run_clock import RunClock
from loadtest.users.sender import Sender
from loadtest.users.sending import Outgoing, send_one
from loadtest.users.server_facts import ServerFacts
from loadtest.users.settings import Settings
from loadtest.users.trace_share import TraceShare


@dataclass(slots=True)
class Run:
    run_id: str
    settings: Settings
    facts: ServerFacts
    clock: RunClock
    sender: Sender
    environment: Any  # Locust's
    process_name: str  # "" alone, the worker's number in a distributed run
    trace: TraceShare | None = None
    records: Records = field(default_factory=Records)
    _users: Counter[str] = field(default_factory=Counter)

    @property
    def is_explained(self) -> bool:
        """Whether requests ask for the conductor's decision, which only the report shows."""
        return self.settings.report is not None

    def name_user(self, workload: str) -> str:
        """The n-th user of this workload in this process: the same in every run like this one."""
        self._users[workload] += 1
        return f"{self.process_name}{self._users[workload]}"

    def send(self, outgoing: Outgoing) -> tuple[RequestRecord, StreamedAnswer]:
        try:
            record, answer = send_one(
                self.sender, outgoing, self.settings.request_s_max, self.clock.now_s
            )
        except GreenletExit:  # the run is over and its grace as well
            self.records.cancelled += 1
            raise
        self.records.add(record)
        statistics.count(self.environment, record, len(answer.text.encode()))
        return record, answer

    def parcel(self) -> Parcel:
        """What happened since the last one, for the master."""
        trace = self.trace.progress() if self.trace is not None else None
        return Parcel(self.run_id, *self.records.take(), trace)


def trace_share(
    settings: Settings, facts: ServerFacts, rows: Sequence[TraceRow], part: int, parts: int
) -> TraceShare:
    source = TokenSource(facts.vocabulary_tokens, facts.special_token_ids, settings.seed)
    return TraceShare(rows, source, settings.trace.length_scale, settings.trace.speed, part, parts)
