"""The publishing thread survives bad numbers and ends with the last counts and gauges at 0."""

from __future__ import annotations

import logging

import pytest

from backends.metrics.page import MetricPage, Observations
from backends.triton.metrics_loop import MetricsLoop
from tests.backends.metrics.test_page import PAGES_USED, STEPS, Triton
from tests.e2e.server import wait_until


class Worker:
    def __init__(self) -> None:
        self.steps = 0
        self.pages_used = 3.0
        self.rounds = 0


def publish(page: MetricPage, worker: Worker, now_s: float) -> None:
    worker.rounds += 1
    page.counter_to(STEPS, worker.steps)
    page.gauge(PAGES_USED, worker.pages_used, now_s)


def test_the_last_counts_are_published_and_gauges_end_at_0(monkeypatch) -> None:
    monkeypatch.setattr("backends.triton.metrics_loop.PERIOD_S", 3600.0)
    triton, worker = Triton(), Worker()
    loop = MetricsLoop(lambda: MetricPage("decode", triton), publish, worker)
    worker.steps = 41
    loop.close()
    assert triton[STEPS] == 41
    assert triton[PAGES_USED] == 0.0
    assert worker.rounds == 1


def test_a_number_that_cannot_be_shown_does_not_end_the_thread(
    monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("backends.triton.metrics_loop.PERIOD_S", 0.005)
    triton, worker = Triton(), Worker()
    worker.pages_used = float("nan")
    with caplog.at_level(logging.ERROR):
        loop = MetricsLoop(lambda: MetricPage("decode", triton), publish, worker)
        wait_until(lambda: worker.rounds > 2, "a few rounds")
        worker.pages_used, worker.steps = 5.0, 7
        wait_until(lambda: triton.values.get((PAGES_USED, "")) == 5.0, "the good number")
        loop.close()
    assert "mooncake_pages_used is nan" in caplog.text
    assert triton[STEPS] == 7


def test_triton_that_refuses_a_metric_is_asked_again(monkeypatch) -> None:
    monkeypatch.setattr("backends.triton.metrics_loop.PERIOD_S", 0.005)
    triton, worker, asked = Triton(), Worker(), []

    def make_page() -> MetricPage:
        asked.append(1)
        if len(asked) < 3:
            raise RuntimeError("not now")
        return MetricPage("decode", triton)

    loop = MetricsLoop(make_page, publish, worker)
    wait_until(lambda: worker.rounds, "the page to be made")
    loop.close()
    assert len(asked) == 3


def test_values_that_gave_way_to_others_are_said_in_the_log(
    monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("backends.triton.metrics_loop.PERIOD_S", 3600.0)
    observations = Observations(values_max=2)
    for _ in range(3):
        observations.observe("mooncake_decode_queue_seconds", 0.1)
    loop = MetricsLoop(
        lambda: MetricPage("decode", Triton()),
        lambda page, waiting, _: page.take(waiting),
        observations,
    )
    with caplog.at_level(logging.WARNING):
        loop.close()
    assert "lost values of metrics" in caplog.text
