"""The input of one routing search (routing.py, and compiled.py in native code)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from conductor.load.cluster import Cluster
from conductor.load.decode_batch import DecodeLoad
from conductor.load.pool import Mask
from conductor.load.worker import WorkerState
from conductor.messages import Request
from conductor.queue_order import QueueOrder

# (cluster, decode workers, end of the prefill, now) -> loads without the request
Loads = Callable[[Cluster, Sequence[WorkerState], float, float], list[DecodeLoad]]


class RouteQuery(NamedTuple):  # a frozen dataclass would take a microsecond longer to make
    """One request, the workers that may take it, and the limits that admission sets."""

    cluster: Cluster
    request: Request
    usable: tuple[Mask, Mask]  # candidate prefill and decode workers, at least one of each
    loads: Loads | None  # the decode loads that admission assumes; None: the reserved loads
    order: QueueOrder  # gives the request its order key
    ttft_limit_s: float  # pairs with a higher predicted TTFT are rejected later
    now_s: float
