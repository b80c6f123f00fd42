"""Publishing: only what is declared, only what changed, and never a counter that goes down."""

from __future__ import annotations

import math

import pytest

from backends.metrics.page import REFRESH_S, MetricPage, Observations, Undeclared
from backends.metrics.table import METRICS, Metric

PAGES_USED, STEPS = "mooncake_pages_used", "mooncake_steps_total"
BYTES, NODE_BYTES = "mooncake_transfer_bytes_total", "mooncake_store_bytes_used"


class Triton:
    """Keeps what Triton keeps: a value per name and labels, shared by all processes of a model."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}
        self.calls = 0

    def __call__(self, metric: Metric, labels: dict[str, str]) -> Series:
        return Series(self, (metric.name, ",".join(labels[key] for key in sorted(labels))))

    def __getitem__(self, key: tuple[str, str] | str) -> float:
        return self.values[key if isinstance(key, tuple) else (key, "")]


class Series:
    def __init__(self, triton: Triton, key: tuple[str, str]) -> None:
        self._triton, self._key = triton, key
        triton.values.setdefault(key, 0.0)

    def set(self, value: float) -> None:
        self._triton.calls += 1
        self._triton.values[self._key] = value

    def increment(self, value: float) -> None:
        assert value > 0
        self._triton.calls += 1
        self._triton.values[self._key] += value

    def observe(self, value: float) -> None:
        """As a test sees a histogram: its count."""
        self.increment(1.0)


@pytest.fixture
def triton() -> Triton:
    return Triton()


def test_counters_and_histograms_with_known_labels_stand_at_0_from_the_start(
    triton: Triton,
) -> None:
    MetricPage("decode", triton)
    assert triton[STEPS] == 0.0
    assert triton[BYTES, "read,nixl"] == 0.0
    assert triton["mooncake_decode_queue_seconds"] == 0.0
    assert not [name for name, _ in triton.values if METRICS[name].kind == "gauge"]
    assert not [name for name, _ in triton.values if "decode" not in METRICS[name].publishers]


@pytest.mark.parametrize(
    ("name", "labels", "reason"),
    [
        ("mooncake_made_up", {}, "not in backends/metrics/table"),
        (STEPS, {}, "is a counter"),
        ("mooncake_requests_live", {}, "no gauge of decode"),
        (PAGES_USED, {"worker": "x"}, "has the labels"),
        ("mooncake_worker_info", {"role": "decode"}, "has the labels"),
    ],
)
def test_what_is_not_declared_cannot_be_published(
    triton: Triton, name: str, labels: dict[str, str], reason: str
) -> None:
    with pytest.raises(Undeclared, match=reason):
        MetricPage("decode", triton).gauge(name, 1.0, 0.0, **labels)


def test_a_label_has_one_of_its_declared_values(triton: Triton) -> None:
    page = MetricPage("prefill", triton)
    with pytest.raises(Undeclared, match="path is one of"):
        page.counter_to("mooncake_prompt_tokens_total", 1, path="guessed")
    observations = Observations()
    observations.observe("mooncake_prompt_tokens_total", 1, path="guessed")
    with pytest.raises(Undeclared, match="path is one of"):
        page.take(observations)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_but_numbers_reaches_the_page(triton: Triton, value: float) -> None:
    page = MetricPage("decode", triton)
    observations = Observations()
    observations.observe("mooncake_decode_queue_seconds", value)
    with pytest.raises(ValueError, match="mooncake_pages_used is"):
        page.gauge(PAGES_USED, value, 0.0)
    with pytest.raises(ValueError, match="mooncake_decode_queue_seconds is"):
        page.take(observations)


def test_a_gauge_that_stays_is_sent_once_a_second_only(triton: Triton) -> None:
    page = MetricPage("decode", triton)
    for turn in range(20):
        page.gauge(PAGES_USED, 7, turn * REFRESH_S / 10)
    assert triton.calls == 2
    page.gauge(PAGES_USED, 8, 0.0)
    assert triton[PAGES_USED] == 8 and triton.calls == 3


def test_a_counter_goes_on_where_the_process_before_left_it(triton: Triton) -> None:
    old = MetricPage("decode", triton)
    old.counter_to(STEPS, 100)
    new = MetricPage("decode", triton)
    new.counter_to(STEPS, 5)  # which counts from 0
    old.counter_to(STEPS, 110)  # and goes on for a while: a reload overlaps
    new.counter_to(STEPS, 5)
    assert triton[STEPS] == 115


def test_gauges_of_a_model_that_is_gone_are_0_and_its_counters_stay(triton: Triton) -> None:
    page = MetricPage("decode", triton)
    page.gauge(PAGES_USED, 7, 0.0)
    page.counter_to(STEPS, 9)
    page.clear()
    assert (triton[PAGES_USED], triton[STEPS]) == (0.0, 9.0)


def test_a_process_that_ended_late_hides_the_gauges_of_its_successor_for_a_second_only(
    triton: Triton,
) -> None:
    old, new = MetricPage("decode", triton), MetricPage("decode", triton)
    old.gauge("mooncake_pages_max", 512, 0.0)
    new.gauge("mooncake_pages_max", 256, 0.0)
    old.clear()
    new.gauge("mooncake_pages_max", 256, REFRESH_S)
    assert triton["mooncake_pages_max"] == 256


def test_what_is_published_no_more_goes_to_0(triton: Triton) -> None:
    page = MetricPage("conductor", triton)
    for node in ("s0", "s1"):
        page.gauge(NODE_BYTES, 5, 0.0, node=node)
    page.end_round()
    page.gauge(NODE_BYTES, 5, 0.1, node="s0")
    page.end_round()
    assert (triton[NODE_BYTES, "s0"], triton[NODE_BYTES, "s1"]) == (5.0, 0.0)
    page.gauge(NODE_BYTES, 5, 0.2, node="s1")
    assert triton[NODE_BYTES, "s1"] == 5.0


def test_observations_of_a_histogram_go_one_by_one_amounts_of_a_counter_together(
    triton: Triton,
) -> None:
    page = MetricPage("conductor", triton)
    observations = Observations()
    for _ in range(3):
        observations.observe("mooncake_ttft_seconds", 0.1)
        observations.observe("mooncake_requests_total", outcome="answered")
    observations.observe("mooncake_requests_total", outcome="cancelled")
    page.take(observations)
    assert triton["mooncake_ttft_seconds"] == 3
    assert triton["mooncake_requests_total", "answered"] == 3
    assert triton["mooncake_requests_total", "cancelled"] == 1
    assert triton.calls == 3 + 2
    page.take(observations)
    assert triton.calls == 3 + 2


def test_what_outlives_a_page_is_counted_on_and_the_rest_begins_anew() -> None:
    """A worker that takes its other role: its steps are counted anew, its store's bytes go on."""
    triton = Triton()
    labels = {"transport": "mapped", "direction": "read"}
    first = MetricPage("prefill", triton)
    first.counter_to(STEPS, 10)
    first.counter_to(BYTES, 100, **labels)
    second = MetricPage("decode", triton)
    second.go_on_from(first, (BYTES,))
    second.counter_to(STEPS, 3)
    second.counter_to(BYTES, 130, **labels)
    assert triton[STEPS] == 13
    assert triton[BYTES, "read,mapped"] == 130


@pytest.mark.parametrize(
    ("name", "labels"), [("mooncake_made_up", {}), (BYTES, {"direction": "none"})]
)
def test_an_undeclared_observation_loses_no_other_value(
    triton: Triton, name: str, labels: dict[str, str]
) -> None:
    page, observations = MetricPage("decode", triton), Observations()
    observations.observe(STEPS, 2.0)
    observations.observe(name, 1.0, **labels)
    observations.observe(STEPS, 3.0)
    with pytest.raises(Undeclared):
        page.take(observations)
    assert triton[STEPS] == 2.0
    page.take(observations)
    assert triton[STEPS] == 5.0
