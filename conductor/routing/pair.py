"""What one request would meet at one prefill worker, at one decode worker, and at both.

Made only of the workers that are looked at one by one; a decision compares all of them as columns
(routing.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from conductor.load.decode_batch import Load
from conductor.load.worker import Worker
from conductor.messages import Prediction
from conductor.routing.fetching import Source


@dataclass(slots=True)
class PrefillOption:
    """One prefill worker and what the request would meet there."""

    worker: Worker
    local_blocks: int  # its node has them, on its SSD too
    restore_blocks: int  # of these, on the SSD
    cached_tokens: int
    source: Source | None  # of what is fetched
    queue_s: float  # all work there
    wait_s: float  # of it, what goes before this request
    fetch_s: float  # restoring and fetching
    transfer_s: float  # of that, what the wait does not hide
    prefill_s: float
    delay_s: float  # what it does to others there
    has_room: bool  # its queue is bounded

    @property
    def start_s(self) -> float:
        """The first token, before the hand-over."""
        return self.wait_s + self.transfer_s + self.prefill_s

    @property
    def fetch_blocks(self) -> int:
        return self.source.blocks - self.local_blocks if self.source else 0

    @property
    def fetch_node(self) -> str | None:
        return self.source.node_id if self.source else None


@dataclass(slots=True)
class DecodeOption:
    """One decode worker and its step when this request would join it."""

    worker: Worker
    load: Load  # as the admission policy sees it, without this request
    tbt_s: float  # with it
    has_room: bool


@dataclass(slots=True)
class Pair:
    prefill: PrefillOption
    decode: DecodeOption
    predicted: Prediction
