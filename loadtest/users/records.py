"""The records of one run: kept here, or on their way from a worker to its master.

They travel as MessagePack; times need no shifting, because every process of a run counts from the
same moment (run_clock.py).
"""

from __future__ import annotations

import dataclasses

import msgspec

from loadtest.results.metrics import RequestRecord
from loadtest.users.trace_share import TraceProgress


class Parcel(msgspec.Struct, frozen=True):
    """What a worker hands over: records since the last parcel, and how its part of a trace goes."""

    run_id: str
    records: list[RequestRecord]
    cancelled: int
    trace: TraceProgress | None = None


class Records:
    """Every request that ended by itself; those that the run's end cut off are only counted."""

    def __init__(self) -> None:
        self.all: list[RequestRecord] = []
        self.cancelled = 0

    def add(self, record: RequestRecord) -> None:
        self.all.append(record)

    def take(self) -> tuple[list[RequestRecord], int]:
        """Everything, for a parcel; this side forgets it."""
        taken = self.all, self.cancelled
        self.all, self.cancelled = [], 0
        return taken

    def merge(self, parcel: Parcel) -> None:
        self.all += parcel.records
        self.cancelled += parcel.cancelled

    def in_order(self, keep_index: bool) -> list[RequestRecord]:
        """As they were due. Indices of a trace are its rows'; others count in this order."""
        ordered = sorted(self.all, key=lambda record: (record.due_s, record.request_id))
        if keep_index:
            return ordered
        return [dataclasses.replace(record, index=i) for i, record in enumerate(ordered)]


def packed(parcel: Parcel) -> bytes:
    return msgspec.msgpack.encode(parcel)


def unpacked(data: bytes) -> Parcel:
    return msgspec.msgpack.decode(data, type=Parcel)
