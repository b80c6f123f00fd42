"""Where a request's time went, from the times in its record and its decision. Pure arithmetic.

    queue      waiting at the prefill worker                  \\
    transfer   its cached prefix into the pages of the engine  | until the first token, with what
    prefill    computing the rest of the prompt               /  is elsewhere by then
    hand-over  its KV into the store, waiting at the decode worker, and from the store into the
               pages of that engine; the first token is out before it
    decode     from the first token to the last, without the hand-over in between
    elsewhere  the remainder of the client's time: the conductor, Triton, the network, the client

A request without a decision, or whose decision lacks these times, was not measured: None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtest.results.metrics import COMPLETED, RequestRecord, Spread, spread

PHASES = ("queue", "transfer", "prefill", "hand-over", "decode", "elsewhere")
GROUPS_MAX = 10
ROUNDING_S = 1e-9  # rounding error of sums of times without an elsewhere


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of one request, in seconds; none is negative."""

    ttft_s: float
    latency_s: float
    all: dict[str, float]  # of the whole request, by the names in PHASES
    until_first_token: dict[str, float]


@dataclass(frozen=True, slots=True)
class PhaseSpread:
    name: str
    spread: Spread
    total_s: float
    share: float  # of the total time of these requests


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of similar TTFT, and the mean of each phase over them."""

    requests: int
    ttft_s: float  # median of the group
    phases_s: dict[str, float]


def phases_of(record: RequestRecord) -> Phases | None:
    """None unless the request was completed and its decision has the times."""
    decision = record.decision
    if record.outcome != COMPLETED or record.ttft_s is None or decision is None:
        return None
    queue_s, transfer_s, prefill_s, put_s = (
        seconds(decision, name) for name in ("queue_s", "load_s", "prefill_s", "put_s")
    )
    if queue_s is None or transfer_s is None or prefill_s is None or put_s is None:
        return None
    # An answer of one token never reaches a decode worker and has neither of these.
    wait_s = sum(seconds(decision, name) or 0.0 for name in ("decode_queue_s", "decode_load_s"))
    between_tokens_s = record.token_times_s[-1] - record.token_times_s[0]
    computed = {"queue": queue_s, "transfer": transfer_s, "prefill": prefill_s}
    later = {"hand-over": put_s + wait_s, "decode": max(0.0, between_tokens_s - put_s - wait_s)}
    return Phases(
        ttft_s=record.ttft_s,
        latency_s=record.latency_s,
        all=_with_the_rest(computed | later, record.latency_s),
        until_first_token=_with_the_rest(computed, record.ttft_s),
    )


def _with_the_rest(found: dict[str, float], whole_s: float) -> dict[str, float]:
    rest_s = whole_s - sum(found.values())
    return found | {"elsewhere": rest_s if rest_s > ROUNDING_S else 0.0}


def measured(records: Sequence[RequestRecord]) -> list[Phases]:
    return [phases for record in records if (phases := phases_of(record)) is not None]


def mean_of(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each phase over requests; at least one is required."""
    assert found, "a mean of nothing"
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


def spreads(found: Sequence[Phases]) -> list[PhaseSpread]:
    """Empty when no request was measured."""
    rows = []
    whole_s = sum(sum(one.all.values()) for one in found)
    for name in PHASES:
        values = [one.all[name] for one in found]
        if (over := spread(values)) is not None:
            total_s = sum(values)
            share = total_s / whole_s if whole_s else 0.0
            rows.append(PhaseSpread(name, over, total_s, share))
    return rows


def by_ttft(found: Sequence[Phases]) -> list[Group]:
    """Deciles: from the fastest tenth of the requests to the slowest, of nearly equal size."""
    ordered = sorted(found, key=lambda phases: phases.ttft_s)
    count = min(GROUPS_MAX, len(ordered))
    borders = [len(ordered) * i // count for i in range(count + 1)] if count else []
    parts = [ordered[a:b] for a, b in pairwise(borders)]
    return [
        Group(
            requests=len(part),
            ttft_s=part[len(part) // 2].ttft_s,
            phases_s=mean_of([phases.until_first_token for phases in part]),
        )
        for part in parts
    ]


def seconds(decision: Mapping[str, object], name: str) -> float | None:
    """A time that the server reported; None when it is missing or invalid."""
    value = decision.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None


def predicted_ttft_s(record: RequestRecord) -> float | None:
    """The TTFT that the conductor expected when it chose the workers."""
    predicted = (record.decision or {}).get("predicted")
    return seconds(predicted, "ttft_s") if isinstance(predicted, Mapping) else None
