"""The sampler against a real page over loopback: what it keeps, and what it survives."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from loadtest.client.metrics_page import MetricsSampler

NEVER_S = 3_600.0  # between samples: only the first and the last are taken
GOOD = """# TYPE mooncake_pages_used gauge
mooncake_pages_used{model="prefill_0"} 3
mooncake_ttft_seconds_bucket{le="0.1"} 4
mooncake_ttft_seconds_sum 0.5
mooncake_queue_tokens NaN
nv_inference_count 9
"""


@contextmanager
def serving(pages: list[str | None]) -> Iterator[tuple[str, threading.Event]]:
    """A page a question, the last one again and again; None is an error 500. Tells of the first."""
    answers = itertools.chain(pages, itertools.repeat(pages[-1]))
    is_asked = threading.Event()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = next(answers)
            self.send_response(200 if text is not None else 500)
            self.end_headers()
            self.wfile.write((text or "").encode())
            is_asked.set()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics", is_asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)


def sampled(pages: list[str | None]) -> tuple[MetricsSampler, list]:
    clock = itertools.count(10)
    with serving(pages) as (url, is_asked):
        sampler = MetricsSampler(url, lambda: float(next(clock)), NEVER_S, settle_s=0.0)
        sampler.start()
        assert is_asked.wait(10.0)
        return sampler, sampler.stop()


def test_a_sample_holds_our_series_with_the_runs_clock_and_no_buckets() -> None:
    sampler, samples = sampled([GOOD])
    assert sampler.problem == ""
    assert [sample.time_s for sample in samples] == [10.0, 11.0]
    assert samples[0].values == {
        'mooncake_pages_used{model="prefill_0"}': 3.0,
        "mooncake_ttft_seconds_sum": 0.5,
    }


def test_the_last_sample_is_taken_when_the_run_has_ended() -> None:
    _, samples = sampled(["mooncake_total 1", "mooncake_total 2"])
    assert [sample.values["mooncake_total"] for sample in samples] == [1.0, 2.0]


def test_a_page_that_cannot_be_read_is_left_out_and_said() -> None:
    for broken, why in (
        (None, "HTTP Error 500"),
        ("up 1", "no series begins with mooncake_"),
        ("mooncake_broken{", "http://127.0.0.1"),
    ):
        sampler, samples = sampled([broken, GOOD])
        assert len(samples) == 1 and samples[0].values
        assert why in sampler.problem


def test_a_server_that_is_not_there_gives_no_samples_and_no_error() -> None:
    with serving([GOOD]) as (url, _):
        pass  # nobody listens there any more
    sampler = MetricsSampler(url, lambda: 0.0, NEVER_S, settle_s=0.0)
    sampler.start()
    assert sampler.stop() == []
    assert url in sampler.problem
