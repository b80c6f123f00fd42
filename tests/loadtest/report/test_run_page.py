"""A run's page: it is the run's file, shows odd runs honestly, and trusts nothing that it shows."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

from loadtest.report import run_page as pages
from loadtest.report.page import rendered
from loadtest.report.pictures import lengths
from loadtest.report.run_page import write_report
from loadtest.results.lengths import by_length
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, Slo
from loadtest.results.recording import Recording, RecordingError, Sample, read_report, to_bytes
from tests.loadtest.report.pages import ParsedPage
from tests.loadtest.report.runs import DECISION, answered, full, recording, sample, unserved


@pytest.fixture(scope="module")
def html() -> str:
    return page_of(full())


@pytest.fixture(scope="module")
def page(html: str) -> ParsedPage:
    return ParsedPage(html)


def page_of(run: Recording) -> str:
    return rendered(pages.page_of(run, to_bytes(run).decode()))


def test_the_page_is_the_runs_file_and_the_same_run_gives_the_same_page(
    tmp_path: Path, html: str
) -> None:
    path = tmp_path / "run.html"
    write_report(full(), path)
    assert read_report(path) == full()
    assert path.read_text() == html


def test_a_file_that_is_no_report_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    with pytest.raises(RecordingError, match=r"run\.html: No such file"):
        read_report(path)
    path.write_text("<html></html>")
    with pytest.raises(RecordingError, match=r"run\.html: no report of a run"):
        read_report(path)
    path.write_text('<script type="application/x-mooncake-recording">AAAA</script>')
    with pytest.raises(RecordingError, match=r"run\.html: not a recording"):
        read_report(path)


def test_a_run_is_not_lost_when_its_pictures_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list:
        raise ZeroDivisionError

    monkeypatch.setattr(pages, "sections", broken)
    with pytest.raises(ZeroDivisionError):
        write_report(full(), tmp_path / "run.html")
    assert read_report(tmp_path / "run.html") == full()
    assert "were not drawn" in ParsedPage((tmp_path / "run.html").read_text()).words


def test_everything_that_was_measured_is_on_the_page(page: ParsedPage) -> None:
    text = page.words
    assert len(page.alts) == 12 and all(page.alts)
    assert "Not measured" not in text and "not measured" not in text
    for expected in (
        "TTFT",
        "TBT",
        "Requests over time",
        "Cache hits over time",
        "Prefill workers",
        "Decode workers",
        "Where the time to the first token went",
        "Where the whole time went",
        "Predicted and actual TTFT",
        "Outcomes by prompt length",
        "Rejections by reason",
        "no complete answer in time",
        "Slowest requests",
        "chat",
        "burst",
    ):
        assert expected in text, expected
    assert "8 of 12" in text and "8 met TTFT ≤ 1 s and TBT ≤ 200 ms" not in text
    assert "0 met TTFT ≤ 1 s and TBT ≤ 200 ms" in text  # every TBT is 250 ms
    assert "unlimited cache: 80.0%" in text


def test_the_pictures_say_their_numbers_in_words(page: ParsedPage) -> None:
    alts = " | ".join(page.alts)
    assert "burst (4): p50 500 ms" in alts and "100.0% within 1 s" in alts
    assert "512 of 800 prompt tokens were cached" in alts
    assert "ttft_slo: 2; decode_full: 1" in alts
    assert "waiting 3, running 1, tokens left 500" in alts and "pages 25%" in alts
    assert "tokens/s 20, busy 50%" in alts
    assert "the median actual TTFT is 1.25 times the predicted one" in alts


def test_nothing_is_loaded_and_nothing_runs(page: ParsedPage, html: str) -> None:
    assert page.scripts == ["application/x-mooncake-recording"]
    assert all(address.startswith("#") for address in page.addresses)
    assert "default-src 'none'" in html
    assert "http://" not in html.replace("http://www.w3.org/", "")


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"' {{ 7*7 }} $\\frac{1}$"


@pytest.mark.slow
def test_text_from_a_server_stays_text() -> None:
    run = recording(
        [
            answered(0, request_id=HOSTILE, workload=HOSTILE, decision={**DECISION, "x": HOSTILE}),
            answered(1, workload="_hidden", decision={**DECISION, "prefill": HOSTILE}),
            unserved(2, FAILED, HOSTILE, HOSTILE),
            unserved(3, REJECTED, HOSTILE + "\x00\x1b[31m\n日本", HOSTILE),
        ],
        title=HOSTILE,
        name=HOSTILE,
        settings={HOSTILE: HOSTILE},
        samples=[
            sample(0.0),
            sample(1.0),
            Sample(
                2.0, {f"mooncake_queue_tokens{{model={json.dumps(HOSTILE)}}}": 1.0, HOSTILE: 2.0}
            ),
        ],
    )
    html = page_of(run)
    found = ParsedPage(html)  # well formed, no handler, nothing loaded
    assert found.scripts == ["application/x-mooncake-recording"]
    assert all(address.startswith("#") for address in found.addresses)
    assert "alert(1)" in found.words and "{{ 7*7 }}" in found.words
    assert "<img" not in html and "\x00" not in html and "\x1b" not in html


@pytest.mark.slow
def test_a_message_cannot_pass_for_the_recording(tmp_path: Path) -> None:
    forged = '<script type="application/x-mooncake-recording">AAAA</script>'
    run = recording([answered(0), unserved(1, FAILED, "x", forged)], title=forged)
    write_report(run, tmp_path / "run.html")
    assert read_report(tmp_path / "run.html") == run


def many(count: int) -> Recording:
    lengths = [1, 7, 60, 500, 4_000, 100_000]
    return recording(
        [
            answered(
                i,
                sent_s=i / 100,
                prompt_tokens=lengths[i % 6],
                workload=f"load-{i % 9}",
                token_times_s=(i / 100 + 0.01 * (1 + i % 50), i / 100 + 1.0),
            )
            for i in range(count)
        ],
        samples=[
            Sample(
                float(s),
                {
                    f'{name}{{model="p{i}"}}': float(s * i)
                    for i in range(6)
                    for name in ("mooncake_queue_tokens", "mooncake_pages_used")
                },
            )
            for s in range(300)
        ],
    )


ODD: dict[str, tuple[Recording, list[str]]] = {
    "no request at all": (
        recording([]),
        ["No request ended in this run", "no request was sent", "no answered request has a TTFT"],
    ),
    "one request": (recording([answered(0)]), ["1 of 1", "1 requests in 1 groups"]),
    "one request of one token, at once": (
        recording([answered(0, token_times_s=(0.0,), finished_s=0.0, decision=None)]),
        ["1 at 0", "no answered request has a TBT"],
    ),
    "nothing answered": (
        recording([unserved(0, REJECTED, "decode_full"), unserved(1, FAILED, "unreachable")]),
        ["0 of 2", "no request was answered", "no answered request has a TTFT"],
    ),
    "no samples": (recording([answered(0)]), ["no samples of the server"]),
    "samples of something else": (
        recording([answered(0)], samples=[Sample(0.0, {"mooncake_other": 1.0})]),
        ["the samples name none"],
    ),
    "one sample": (recording([answered(0)], samples=[sample(0.5)]), ["1 samples"]),
    "no decision": (
        recording([answered(0, decision=None)]),
        ["a decision has to be asked for", "no answered request has a decision"],
    ),
    "no hit rate": (
        recording([answered(0, cached_tokens=None)]),
        ["no answer reported its cached tokens", "not measured: no answer reported it"],
    ),
    "a simulated run": (
        recording([answered(i) for i in range(5)], name="simulate", started_at=""),
        ["simulate, 5 requests"],
    ),
    "everything at the same moment": (
        recording([answered(0, token_times_s=(0.5, 0.5)) for _ in range(20)], slo=Slo(0.5, None)),
        ["20 at 0 (tokens in one message)"],
    ),
    "interrupted": (
        recording([answered(0)], settings={"is_interrupted": True, "cancelled": 3}),
        ["This run was interrupted; 3 requests"],
    ),
    "days": (
        recording(
            [
                answered(
                    i,
                    sent_s=i * 9_000.0,
                    finished_s=i * 9_000.0 + 2,
                    token_times_s=(i * 9_000.0 + 1,),
                )
                for i in range(30)
            ]
        ),
        ["30 requests in"],
    ),
    "more than can be drawn": (
        many(3_000),
        ["more with fewer requests are left out", "the mean of 6 workers", "points are drawn"],
    ),
    "answers without an outcome that is known": (
        recording([answered(0, outcome="lost"), answered(1)]),
        ["1 of 2"],
    ),
    "a prompt of unknown length": (
        recording([answered(0, prompt_tokens=0), answered(1, prompt_tokens=0)]),
        ["2 of 2"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_an_odd_run_has_a_page_that_says_what_was_not_measured(name: str, tmp_path: Path) -> None:
    run, expected = ODD[name]
    write_report(run, tmp_path / "run.html")
    assert read_report(tmp_path / "run.html") == run
    text = ParsedPage((tmp_path / "run.html").read_text()).words
    for phrase in expected:
        assert phrase in text, phrase
    assert "nan" not in text.lower().split() and "inf" not in text.lower().split()


def test_a_number_that_is_none_is_never_shown(tmp_path: Path) -> None:
    odd = {**DECISION, "ttft_s": math.nan, "predicted": {"ttft_s": math.inf}}
    text = ParsedPage(page_of(recording([answered(0, decision=odd)]))).words
    assert "no answered request has a decision with a predicted TTFT" in text


def test_drawing_leaves_no_trace_in_matplotlib() -> None:
    before = dict(matplotlib.rcParams)
    assert lengths.outcomes(by_length(full())).svg
    assert dict(matplotlib.rcParams) == before
    code = "import sys; import loadtest.report.page\nprint('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_users_who_are_due_at_no_time_of_their_own_are_not_on_time_either(page: ParsedPage) -> None:
    assert "sender lag" not in page.words
    late = recording([answered(0, due_s=-0.5), answered(1)])
    assert "sender lag" in ParsedPage(page_of(late)).words


@pytest.mark.slow
def test_the_slowest_requests_come_with_their_decision() -> None:
    slow = answered(3, token_times_s=(3.9,), request_id="slow-one")
    run = recording([answered(0), answered(1), dataclasses.replace(slow, outcome=COMPLETED)])
    text = ParsedPage(page_of(run)).words
    assert text.index("slow-one") < text.index("r-0")
    assert "prefill_0 → decode_1" in text and '"decode_load_s": 0.03' in text
