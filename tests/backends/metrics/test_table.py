"""The table of metrics keeps Prometheus' habits, and what people read of it is up to date."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from backends.errors import (
    Cancelled,
    Forbidden,
    InvalidRequest,
    KvMissing,
    Overloaded,
    WorkerUnavailable,
)
from backends.frontend.request_times import outcome_of
from backends.metrics.table import METRICS, OUTCOMES, REASONS, SECTIONS, Metric
from tools import metric_docs

ROOT = Path(__file__).resolve().parents[3]


def test_the_docs_are_what_the_table_prints() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == metric_docs.page(), "python -m tools.metric_docs > docs/metrics.md"


def test_no_name_is_declared_twice() -> None:
    assert sum(len(metrics) for metrics in SECTIONS.values()) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_a_metric_keeps_prometheus_habits(metric: Metric) -> None:
    if metric.name.startswith(("nv_trt_llm_", "vllm:")):
        return  # named by TensorRT-LLM or vLLM
    assert re.fullmatch(r"mooncake_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert set(metric.publishers) <= {"conductor", "prefill", "decode", "gateway"}
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.unit in ("seconds", "bytes"):
        assert f"_{metric.unit}" in metric.name, "the unit is part of the name"
    assert not re.search(r"_(ms|us|mib|kb|minutes|percent)(_|$)", metric.name)
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.meaning.endswith(".") and "|" not in metric.meaning
    assert not {"model", "le"} & {label.name for label in metric.labels}, "taken"
    assert not metric.is_use or metric.kind == "gauge"


def test_buckets_of_seconds_reach_from_a_millisecond_to_two_minutes_without_gaps() -> None:
    bounds = METRICS["mooncake_ttft_seconds"].buckets
    assert bounds[0] <= 0.001 and bounds[-1] >= 60
    assert all(after <= 2 * before for before, after in itertools.pairwise(bounds))


def test_every_query_in_the_docs_asks_for_declared_metrics() -> None:
    for what, query in metric_docs.QUERIES:
        names = re.findall(r"mooncake_\w+", query)
        assert names, what
        for name in names:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            metric = METRICS.get(name) or METRICS[base]
            assert (name != metric.name) == (metric.kind == "histogram"), (what, name)
        for bound in re.findall(r'le="([^"]*)"', query):
            assert float(bound) in METRICS["mooncake_ttft_seconds"].buckets, what


def test_every_way_a_request_ends_and_is_rejected_is_in_the_table() -> None:
    errors = [
        None,
        Overloaded("x", "y", 1.0),
        InvalidRequest("x"),
        WorkerUnavailable("x"),
        Forbidden("x"),
        KvMissing("x"),
        Cancelled("x"),
        RuntimeError("x"),
    ]
    assert {outcome_of(error) for error in errors} == set(OUTCOMES)


def test_every_kind_of_rejection_in_the_code_is_a_reason_in_the_table() -> None:
    page = ROOT / "docs" / "reference" / "requests.md"
    told = re.search(r"K: (.*?)\|", page.read_text(), re.DOTALL)
    assert told, "the page that tells clients the kinds"
    assert set(re.findall(r"`(\w+)`", told[1])) == set(REASONS) - {"other"}
    advice = (ROOT / "docs" / "how-to" / "read-a-rejection.md").read_text()
    rows = [line.split("|")[1] for line in advice.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(REASONS) - {"other"}
    code = "".join(path.read_text() for path in (ROOT / "backends").rglob("*.py"))
    raised = set(re.findall(r'Overloaded\(\s*"(\w+)"', code))
    assert raised and raised <= set(REASONS), raised - set(REASONS)
