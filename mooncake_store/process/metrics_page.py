"""Prometheus metrics of a store process: GET http://HOST:PORT/metrics.

A page has its own threads. It also has its own registry, so it shows no metrics of other libraries.
Collectors make the metrics from numbers that other modules maintain.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Histogram, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake_store.errors import StoreError
from mooncake_store.process.bounded_http import BoundedHttpServer

LOOPBACK = "127.0.0.1"  # default address of pages
# Bucket limits of latency histograms, in seconds.
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class PortTaken(StoreError):
    """The page cannot listen at its address; the message names the options to change."""


class MetricsPage:
    """Serves until close(). Port 0 takes any free port, which is then in `port`. (The option
    --metrics-port 0 is different: the process then starts no page.)"""

    def __init__(self, port: int, collectors: Sequence[Collector], host: str = LOOPBACK) -> None:
        registry = CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        try:
            self._server = BoundedHttpServer((host, port), MetricsHandler.factory(registry))
        except OSError as error:
            raise PortTaken(
                f"cannot serve metrics at {host}:{port} ({error.strerror or error}): choose "
                "another --metrics-port (0 for none) or --metrics-address"
            ) from error
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Latencies(Collector):
    """A histogram of seconds per verb. Thread-safe; observe() takes a few microseconds."""

    def __init__(self, name: str, meaning: str) -> None:
        self._histogram = Histogram(name, meaning, ["verb"], buckets=SECONDS, registry=None)
        self._lock = threading.Lock()
        self._children: dict[str, Histogram] = {}

    def observe(self, verb: str, seconds: float) -> None:
        child = self._children.get(verb)
        if child is None:
            with self._lock:
                child = self._children[verb] = self._histogram.labels(verb)
        child.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        return self._histogram.collect()


def gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)


Rows = Iterable[tuple[Sequence[str], float]]  # (values of the labels, value)


def gauges(name: str, meaning: str, labels: Sequence[str], rows: Rows) -> Metric:
    return _with_rows(GaugeMetricFamily(name, meaning, labels=labels), rows)


def counters(name: str, meaning: str, labels: Sequence[str], rows: Rows) -> Metric:
    return _with_rows(CounterMetricFamily(name, meaning, labels=labels), rows)


def _with_rows(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for values, value in rows:
        family.add_metric(values, value)
    return family
