"""The figures of `mooncake status`, computed from two readings of the metrics page. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "mooncake_"
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Page:
    """One reading of the metrics page: the series whose name begins with `mooncake_`."""

    read_at_s: float  # time of the reading, in s of a monotonic clock
    # Name -> (labels, value) of each series. A histogram N has N_bucket, N_sum and N_count.
    series: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True for the page of another kind of server, and before the first model is loaded."""
        return not self.series

    def total(self, name: str, **labels: str) -> float:
        """The sum of all series of `name` that have these labels; 0 if there is none."""
        return sum(self.by(name, "", **labels).values())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Value of `label` -> sum of the series of `name` that have this value and `labels`."""
        found: dict[str, float] = {}
        for series_labels, value in self.series.get(name, ()):
            if labels.items() <= series_labels.items():
                key = series_labels.get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def labels_of(self, name: str) -> list[Labels]:
        """The labels of each series of `name` whose value is 1."""
        return [labels for labels, value in self.series.get(name, ()) if value == 1.0]


def parse(text: str, read_at_s: float) -> Page:
    """The `mooncake_` series of a page in Prometheus' text format. Raises ValueError."""
    ours = [line for line in text.splitlines() if line.startswith(PREFIX)]
    series: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families("\n".join(ours) + "\n"):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Page(read_at_s, series)


@dataclass(frozen=True, slots=True)
class Change:
    """The growth of counters and histograms between two readings."""

    now: Page
    before: Page | None  # None: the growth since the server started

    @property
    def seconds(self) -> float:
        """Time between the readings. It is 0 if `before` is None; every rate is 0 in that case."""
        return self.now.read_at_s - self.before.read_at_s if self.before else 0.0

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Growth of a counter for each value of `label`. If the counter is lower than before, its
        process has restarted, so the growth is the present value."""
        before = self.before.by(name, label, **labels) if self.before else {}
        return {
            key: value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value
            for key, value in self.now.by(name, label, **labels).items()
        }

    def total(self, name: str, **labels: str) -> float:
        return sum(self.by(name, "", **labels).values())

    def rates(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Growth per second of a counter for each value of `label`."""
        seconds = self.seconds
        grown = self.by(name, label, **labels)
        return {key: value / seconds if seconds > 0 else 0.0 for key, value in grown.items()}

    def quantile(self, name: str, q: float) -> float | None:
        """Quantile of a histogram's new values, as PromQL's histogram_quantile; None: no values."""
        return quantile(self.by(f"{name}_bucket", "le"), q)


def quantile(count_at_most: Mapping[str, float], q: float) -> float | None:
    """The q-quantile of a histogram; None without values. `count_at_most`: upper bound of a bucket,
    as text ("0.1", "+Inf") -> number of values up to the bound. Interpolates linearly inside a
    bucket. The first bucket begins at 0. A quantile in the bucket "+Inf" is its lower bound."""
    steps = sorted((float(bound), count) for bound, count in count_at_most.items())
    if not steps or steps[-1][1] <= 0:
        return None
    rank = q * steps[-1][1]
    low, below = 0.0, 0.0
    for bound, count in steps:
        if count >= rank and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


ROLES = ("prefill", "decode")
PATHS = ("computed", "local", "fetched")


class Latency(msgspec.Struct, frozen=True):
    """Percentiles over the requests of a period, in seconds; None without requests."""

    p50_s: float | None
    p90_s: float | None
    count: int  # requests that the percentiles cover


class PeriodView(msgspec.Struct, frozen=True):
    """The figures of a period: of the last seconds, or since the server started."""

    seconds: float  # length of the period; 0: the period since the server started
    requests: dict[str, int]  # by outcome; outcomes with 0 are left out
    rejections: dict[str, int]  # by reason; reasons with 0 are left out
    refused_fields: dict[str, int]  # requests with a wrong or unsupported field, by its name
    ttft: Latency
    tbt: Latency
    token_s: float | None  # mean time per token of all streams, including unfinished streams
    prompt_tokens: dict[str, int]  # by source of the tokens' KV (PATHS)
    hit_rate: float | None  # share of prompt tokens with cached KV, 0 to 1; None without a prompt


class WorkerView(msgspec.Struct, frozen=True):
    name: str
    role: str
    node: str  # name of the worker's storage node
    running: int  # requests
    waiting: int  # requests
    pages_used: int
    pages_max: int
    kv_bytes_used: int
    kv_bytes_max: int
    tokens_per_s: float  # prompt tokens computed (prefill), or tokens generated (decode)
    step_s: float | None  # mean duration of recent engine steps; None without a step
    busy: float  # share of recent time that the engine spent in steps, 0 to 1


class Node(msgspec.Struct, frozen=True):
    name: str  # name of a storage node, or NODE/ssd for its SSD tier
    bytes_used: int
    bytes_max: int
    blocks: int
    evictions_per_s: float


class View(msgspec.Struct, frozen=True):
    up_s: float  # age in s of the oldest model process; 0: unknown
    live: int  # requests in flight
    workers_live: dict[str, int]  # by role; workers in the directory, draining workers included
    workers_wanted: dict[str, float]  # by role; number that the load needs; {} without role_flips
    flips_proposed: dict[str, int]  # proposed role changes since the start, by the new role
    # By "ttft" and "tbt": the service level in s; with `auto`, the mean of recent requests at the
    # frontend where it is longest. Empty without a frontend.
    slo_s: dict[str, float]
    recent: PeriodView
    total: PeriodView
    retries: int  # further attempts of requests, since the server started
    workers: list[WorkerView]
    transfer_bytes_per_s: dict[str, float]  # by transport
    transfer_failures: int  # since the server started
    nodes: list[Node]


def view(now: Page, before: Page, unix_s: float) -> View:
    """The figures. `before`: an earlier page, for rates. `unix_s`: Unix time of reading `now`."""
    recent, total = Change(now, before), Change(now, None)
    started = [at_s for at_s in now.by("mooncake_start_time_seconds", "model").values() if at_s]
    return View(
        up_s=max(0.0, unix_s - min(started)) if started else 0.0,
        live=int(now.total("mooncake_requests_live")),
        workers_live={role: int(now.total("mooncake_workers_live", role=role)) for role in ROLES},
        workers_wanted={
            role: max(found.values())
            for role in ROLES
            if (found := now.by("mooncake_workers_wanted", "model", role=role))
        },
        flips_proposed=_counts(now.by("mooncake_role_flips_proposed_total", "role")),
        slo_s={
            limit: max(found.values())
            for limit in ("ttft", "tbt")
            if (found := now.by("mooncake_slo_seconds", "model", limit=limit))
        },
        recent=span(recent),
        total=span(total),
        retries=int(now.total("mooncake_retries_total")),
        workers=workers(recent),
        transfer_bytes_per_s=recent.rates("mooncake_transfer_bytes_total", "transport"),
        transfer_failures=int(now.total("mooncake_transfer_failures_total")),
        nodes=nodes(recent),
    )


def span(change: Change) -> PeriodView:
    tokens = {path: int(change.total("mooncake_prompt_tokens_total", path=path)) for path in PATHS}
    prompt_tokens = sum(tokens.values())
    intervals = change.total("mooncake_token_intervals_total")
    intervals_s = change.total("mooncake_token_interval_seconds_total")
    return PeriodView(
        seconds=change.seconds,
        requests=_counts(change.by("mooncake_requests_total", "outcome")),
        rejections=_counts(change.by("mooncake_rejections_total", "reason")),
        refused_fields=_counts(change.by("mooncake_gateway_refused_fields_total", "field")),
        ttft=latency(change, "mooncake_ttft_seconds"),
        tbt=latency(change, "mooncake_tbt_seconds"),
        token_s=intervals_s / intervals if intervals else None,
        prompt_tokens=tokens,
        hit_rate=1.0 - tokens["computed"] / prompt_tokens if prompt_tokens else None,
    )


def latency(change: Change, name: str) -> Latency:
    return Latency(
        p50_s=change.quantile(name, 0.5),
        p90_s=change.quantile(name, 0.9),
        count=int(change.total(f"{name}_count")),
    )


def workers(change: Change) -> list[WorkerView]:
    """All workers that publish metrics, prefill workers first."""
    known = {labels["model"]: labels for labels in change.now.labels_of("mooncake_worker_info")}
    rows = [_worker(change, name, labels["role"], labels["node"]) for name, labels in known.items()]
    return sorted(rows, key=lambda row: (row.role != "prefill", row.name))


def _worker(change: Change, name: str, role: str, node: str) -> WorkerView:
    now, seconds = change.now, change.seconds

    def gauge(metric: str) -> int:
        return int(now.total(f"mooncake_{metric}", model=name))

    if role == "prefill":
        tokens = change.total("mooncake_prompt_tokens_total", model=name, path="computed")
    else:
        tokens = change.total("mooncake_output_tokens_total", model=name)
    steps = change.total("mooncake_steps_total", model=name)
    in_steps_s = change.total("mooncake_step_seconds_total", model=name)
    return WorkerView(
        name=name,
        role=role,
        node=node,
        running=gauge("requests_running"),
        waiting=gauge("requests_waiting"),
        pages_used=gauge("pages_used"),
        pages_max=gauge("pages_max"),
        kv_bytes_used=gauge("kv_bytes_used"),
        kv_bytes_max=gauge("kv_bytes_max"),
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        step_s=in_steps_s / steps if steps else None,
        busy=min(1.0, in_steps_s / seconds) if seconds > 0 else 0.0,
    )


def nodes(change: Change) -> list[Node]:
    """The storage nodes in the directory. A node that left has gauges of 0 and is omitted."""
    sizes = change.now.by("mooncake_store_bytes_max", "node")
    used = change.now.by("mooncake_store_bytes_used", "node")
    blocks = change.now.by("mooncake_store_blocks", "node")
    evictions = change.rates("mooncake_store_evictions_total", "node")
    return [
        Node(
            name,
            int(used.get(name, 0)),
            int(size),
            int(blocks.get(name, 0)),
            evictions.get(name, 0.0),
        )
        for name, size in sorted(sizes.items())
        if size
    ]


def _counts(counts: dict[str, float]) -> dict[str, int]:
    return {name: round(count) for name, count in sorted(counts.items()) if count}
