"""A run as named settings and numbers, and two runs setting by setting and number by number.

Pure arithmetic on recordings. A ratio gives the size of a difference. Only more runs can separate
it from noise, so nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadtest.results.metrics import Spread, Summary, summarize
from loadtest.results.phases import PHASES, mean_of, measured
from loadtest.results.recording import Recording, Setting, goodput_of
from loadtest.results.tables import duration, lag_s

LOWER, HIGHER, NEITHER = "lower", "higher", ""
# Numbers that a summary has under the same name: label, unit, and which direction is better.
RATES = (
    ("requests_per_s", "answers per second", "per_s", HIGHER),
    ("input_tokens_per_s", "prompt tokens per second", "per_s", HIGHER),
    ("output_tokens_per_s", "generated tokens per second", "per_s", HIGHER),
    ("input_tokens", "prompt tokens", "count", NEITHER),
    ("output_tokens", "generated tokens", "count", NEITHER),
    ("short_outputs", "short answers", "count", NEITHER),
)
CACHED = (
    ("cached_tokens", "cached prompt tokens", "count", NEITHER),
    ("hit_rate", "hit rate", "share", HIGHER),
    ("ideal_hit_rate", "unlimited hit rate", "share", NEITHER),
    ("cached_over_ideal", "cached / unlimited", "ratio", HIGHER),
)


@dataclass(frozen=True, slots=True)
class Number:
    """`value` is None where it was not measured."""

    name: str  # its JSON name
    label: str  # its name in tables
    unit: str  # count | s | share | per_s | ratio
    value: float | None
    better: str = NEITHER


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not measured"
    if unit == "s":
        return duration(value)
    if unit == "share":
        return f"{value:.1%}"
    if unit == "count":
        return f"{value:,.0f}"
    return rate_text(value)


def rate_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def summary_of(recording: Recording) -> Summary:
    return summarize(recording.requests, recording.ideal_cached_tokens)


def numbers(recording: Recording) -> list[Number]:
    summary = summary_of(recording)
    lag = lag_s(summary)
    return [
        *_counts(summary),
        *_goodput(recording),
        *_of_summary(summary, RATES),
        *_spread("ttft", "TTFT", summary.ttft_s),
        *_spread("tbt", "TBT", summary.tbt_s),
        *_spread("latency", "whole request", summary.latency_s),
        *_of_summary(summary, CACHED),
        *_phases(recording),
        *_refusals(summary),
        Number("sender_lag_p99_s", "sender lag p99", "s", lag.p99 if lag else None, LOWER),
    ]


def _counts(summary: Summary) -> Iterator[Number]:
    requests = summary.requests
    rejected = sum(summary.rejections_by_reason.values())
    failed = sum(summary.errors_by_kind.values())
    yield Number("requests", "requests", "count", requests)
    for name, count, better in (
        ("answered", summary.completed, HIGHER),
        ("rejected", rejected, LOWER),
        ("failed", failed, LOWER),
    ):
        share = count / requests if requests else None
        yield Number(name, name, "count", count, better)
        yield Number(f"{name}_share", f"{name}, share", "share", share, better)
    yield Number("duration_s", "time of the run", "s", summary.duration_s)
    yield Number("offered_per_s", "requests sent per second", "per_s", summary.offered_per_s)


def _goodput(recording: Recording) -> Iterator[Number]:
    found = goodput_of(recording)
    share, per_s = (found.share, found.requests_per_s) if found else (None, None)
    yield Number("goodput_share", "goodput, share", "share", share, HIGHER)
    yield Number("goodput_per_s", "goodput per second", "per_s", per_s, HIGHER)


def _of_summary(summary: Summary, named: Sequence[tuple[str, str, str, str]]) -> Iterator[Number]:
    for name, label, unit, better in named:
        yield Number(name, label, unit, getattr(summary, name), better)


def _spread(name: str, label: str, spread: Spread | None) -> Iterator[Number]:
    for part in ("mean", "p50", "p90", "p99", "max"):
        value = getattr(spread, part) if spread else None
        yield Number(f"{name}_{part}_s", f"{label} {part}", "s", value, LOWER)


def _phases(recording: Recording) -> Iterator[Number]:
    found = measured(recording.requests)
    mean = mean_of([phases.all for phases in found]) if found else {}
    for phase in PHASES:
        name = f"phase_{phase.replace('-', '')}_mean_s"
        yield Number(name, f"{phase}, mean", "s", mean.get(phase), LOWER)


def _refusals(summary: Summary) -> Iterator[Number]:
    for what, kinds in (
        ("rejected", summary.rejections_by_reason),
        ("failed", summary.errors_by_kind),
    ):
        for kind, count in kinds.items():
            yield Number(f"{what}:{kind}", f"{what}: {kind}", "count", count, LOWER)


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of both runs; None where a run has not measured it."""

    name: str
    label: str
    unit: str
    better: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        return self.b - self.a if self.a is not None and self.b is not None else None

    @property
    def ratio(self) -> float | None:
        """B / A; None as well when A is 0."""
        return self.b / self.a if self.a and self.b is not None else None

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """A, B, B - A, B / A."""
        difference = ratio = "-"
        if self.difference is not None:
            sign = "+" if self.difference > 0 else "-" if self.difference < 0 else ""
            size = shown(abs(self.difference), self.unit)
            # a difference of percentages is shown in points, not in percent
            if self.unit == "share":
                size = size.replace("%", " points")
            difference = sign + size
        if self.ratio is not None:
            ratio = f"{self.ratio:.2f}"
        return shown(self.a, self.unit), shown(self.b, self.unit), difference, ratio


def compare(a: Recording, b: Recording) -> list[Compared]:
    """Every number that a run has measured, in the order of `numbers`."""
    of_a, of_b = ({number.name: number for number in numbers(run)} for run in (a, b))
    found = []
    for name in dict.fromkeys([*of_a, *of_b]):
        known: Number = of_a.get(name) or of_b[name]
        row = Compared(
            name, known.label, known.unit, known.better, _value(of_a, name), _value(of_b, name)
        )
        if row.a is not None or row.b is not None:
            found.append(row)
    return found


def _value(found: dict[str, Number], name: str) -> float | None:
    """The value of a number; 0 for a rejection reason that this run does not have."""
    if name in found:
        return found[name].value
    assert ":" in name, f"{name} is in one run only"
    return 0


def differing(
    a: Mapping[str, Setting], b: Mapping[str, Setting]
) -> list[tuple[str, Setting, Setting]]:
    names = dict.fromkeys([*a, *b])
    return [(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def settings_of(recording: Recording) -> dict[str, Setting]:
    found: dict[str, Setting] = dict(recording.settings)
    levels = {"": recording.slo} if recording.slo is not None else {}
    levels |= {f" of {name}": slo for name, slo in recording.slo_by_workload.items()}
    for name, slo in levels.items():
        found |= {f"slo_ttft_s{name}": slo.ttft_s, f"slo_tbt_s{name}": slo.tbt_s}
    return found


def setting_text(value: Setting) -> str:
    return "not set" if value is None else str(value)
