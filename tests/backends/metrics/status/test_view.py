"""What the view says of two readings, and that it fits a terminal."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from backends.metrics.status.readings import Readings
from backends.metrics.status.view import Latency, View, WorkerView, view
from backends.metrics.status.watch import bar, duration, render
from tests.backends.metrics.status.pages import page, server


@pytest.fixture
def seen() -> View:
    """Ten seconds in which as much happened as since the start before them."""
    return view(page(server(2.0), 10.0), page(server(1.0), 0.0), unix_s=1100.0)


def test_amounts_are_told_for_the_last_seconds_and_since_the_start(seen: View) -> None:
    assert (seen.recent.seconds, seen.up_s, seen.live) == (10.0, 100.0, 7)
    assert seen.recent.requests == {"answered": 100, "rejected": 10}
    assert seen.total.requests == {"answered": 200, "rejected": 20}
    assert seen.recent.rejections == {"ttft_slo": 10}
    assert seen.recent.hit_rate == pytest.approx(0.25)
    assert seen.total.prompt_tokens == {"computed": 6000, "local": 1600, "fetched": 400}
    assert seen.recent.token_s == pytest.approx(0.02)
    assert seen.recent.ttft == Latency(pytest.approx(0.1 / 90 * 50), pytest.approx(0.1), 100)
    assert seen.total.tbt == Latency(None, None, 0)


def test_workers_are_those_that_are_there_with_their_recent_speed(seen: View) -> None:
    prefill, decode = seen.workers
    assert prefill == WorkerView(
        "prefill_0",
        "prefill",
        "s0",
        running=4,
        waiting=3,
        pages_used=64,
        pages_max=256,
        kv_bytes_used=64 * 2**17,
        kv_bytes_max=256 * 2**17,
        tokens_per_s=300.0,
        step_s=pytest.approx(0.01),
        busy=pytest.approx(0.05),
    )
    assert (decode.name, decode.tokens_per_s) == ("decode_0", 90.0)
    assert seen.workers_live == {"prefill": 1, "decode": 0}
    assert seen.workers_wanted == {"prefill": 2.5}, "decode: nobody said so"
    assert seen.flips_proposed == {"prefill": 3}


def test_nodes_and_transfers(seen: View) -> None:
    assert [node.name for node in seen.nodes] == ["s0"]
    assert seen.nodes[0].evictions_per_s == 0.5
    assert seen.transfer_bytes_per_s == {"nixl": 400.0}
    assert seen.transfer_failures == 3


def test_the_limits_are_those_of_the_frontend_where_they_are_longest(seen: View) -> None:
    assert seen.slo_s == {"ttft": 3.0, "tbt": 0.06}


def test_one_reading_gives_a_view_without_rates() -> None:
    readings = Readings(10.0)
    readings.add(page(server(), 5.0))
    seen = readings.view(1100.0)
    assert seen.recent.seconds == 0.0 and seen.total.requests["answered"] == 100
    assert seen.workers[0].tokens_per_s == 0.0 and seen.workers[0].busy == 0.0
    assert "-" in text_of(seen, 100)


def test_a_server_that_has_done_nothing_yet_has_a_view() -> None:
    idle = {key: 0.0 for key in server() if "info" not in key and "start_time" not in key}
    seen = view(page(idle, 1.0), page(idle), unix_s=5.0)
    assert seen.recent.hit_rate is None and seen.workers == [] and seen.up_s == 0.0
    assert "the directory does not answer" in text_of(seen, 100)


def text_of(seen: View, columns: int) -> str:
    file = io.StringIO()
    Console(file=file, width=columns).print(render(seen, "http://127.0.0.1:8002/metrics", columns))
    return file.getvalue()


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_view_fits_the_terminal_and_says_what_matters(seen: View, columns: int) -> None:
    text = text_of(seen, columns)
    assert all(len(line) <= columns for line in text.splitlines())
    words = " ".join(text.split())
    for part in (
        "up 100.0 s",
        "live requests 7",
        "TTFT p50 55.6 ms",
        "TTFT limit 3.0 s",
        "TBT limit 60 ms",
        "answered 10.0/s 200",
        "rejected 1.0/s 20",
        "ttft_slo 1.0/s 20",
        "prompt tokens cached 25% 25%",
        "prefill, 1 live",
        "decode, 0 live",
        "roles: prefill 2.5 wanted, 3 flips to prefill proposed",
        "prefill_0 s0 4 3 64/256",
        "300/s 10 ms 5%",
        "s0 2.5 MiB 5.0 MiB",
        "nixl 400 B/s, 3 failed",
        "further attempts 2",
    ):
        assert part in words, (part, text)
    assert "…" not in text, "something was cut"


def test_the_view_is_one_line_of_json(seen: View) -> None:
    line = msgspec.json.encode(seen).decode()
    assert "\n" not in line
    assert msgspec.json.decode(line, type=View).total.requests == seen.total.requests


def test_recent_means_the_last_seconds_however_often_it_is_read() -> None:
    readings = Readings(10.0)
    for second in range(60):
        readings.add(page(server(second), float(second)))
        seen = readings.view(1100.0)
        assert seen.recent.seconds == min(second, 10.0)
        if second:
            assert seen.recent.requests["answered"] == 100 * seen.recent.seconds
    readings.clear()
    readings.add(page(server(), 60.0))
    assert readings.view(1100.0).recent.seconds == 0.0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.00123, "1.23 ms"),
        (0.0556, "55.6 ms"),
        (0.471, "471 ms"),
        (1.34, "1.3 s"),
        (119.0, "119.0 s"),
        (600.0, "10 min"),
        (9000.0, "2.5 h"),
    ],
)
def test_durations_are_short(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_a_bar_shows_the_used_share() -> None:
    assert bar(0, 10).plain == "░" * 10
    assert bar(1, 1000).plain == "█" + "░" * 9, "what is used is seen"
    assert bar(5, 10).plain == "█" * 5 + "░" * 5
    assert bar(11, 10).plain == "█" * 10
    assert bar(0, 0).plain == "░" * 10
