"""The replay command without a server: what it sends, records, refuses and prints."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from backends.cli import main
from loadtest.client.protocol import GenerateRequest, Rejected, ServerError, TokenEvent
from loadtest.client.server import ServerDescription, description
from loadtest.client.triton_client import TritonClient
from loadtest.replay import command
from loadtest.replay.command import (
    ReplayOutputs,
    ReplayRefused,
    TraceSettings,
    address_of_page,
    ideal_of,
    json_line,
    prepare,
    recording_of,
    write_rows,
)
from loadtest.replay.open_loop import ReplayRun, SendOptions, send_one
from loadtest.replay.prompts import PlannedRequest
from loadtest.replay.trace import read_trace
from loadtest.results import tables
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, Slo, Summary, summarize
from loadtest.results.recording import Sample, from_bytes, to_bytes

DATA = Path(__file__).parents[2] / "data"
OPTIONS = SendOptions("127.0.0.1:1", "conductor", True, 10.0, 1, return_decision=False)
SETTINGS = TraceSettings(DATA / "conversation_turns.jsonl", None, 1 / 8, 100.0, seed=0)
SERVER = ServerDescription(64, 8_192, 2_048)


class SteppingClock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        self.time_s += 1.0
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError("a request does not sleep")


class ScriptedClient(TritonClient):
    """Plays events, then raises what it was given."""

    def __init__(self, *events: TokenEvent, error: Exception | None = None) -> None:
        self.events, self.error = events, error
        self.sent: list[GenerateRequest] = []

    async def generate(  # type: ignore[override]
        self, request: GenerateRequest, timeout_s: float = 0.0
    ) -> AsyncIterator[TokenEvent]:
        self.sent.append(request)
        for event in self.events:
            yield event
        if self.error:
            raise self.error


def planned(index: int = 0) -> PlannedRequest:
    return PlannedRequest(index, index + 1, 0.5, np.arange(10, dtype=np.int32), 3)


def record_of(client: ScriptedClient, index: int = 0):
    return asyncio.run(send_one(client, planned(index), OPTIONS, SteppingClock()))


def test_the_answer_is_asked_to_be_exactly_as_long_as_the_traces() -> None:
    client = ScriptedClient()
    record_of(client)
    (sent,) = client.sent
    assert (sent.max_tokens, sent.min_tokens, sent.end_id, sent.stream) == (3, 3, -1, True)


def test_a_record_keeps_the_time_of_every_token() -> None:
    record = record_of(
        ScriptedClient(
            TokenEvent(1.5, (7,), cached_tokens=8, decision={"prefill_worker": "prefill_0"}),
            TokenEvent(1.7, (8, 9), finish_reason="length", cached_tokens=0, decision={"step": 1}),
        )
    )
    assert record.outcome == COMPLETED
    assert record.token_times_s == (1.5, 1.7, 1.7) and record.output_ids == (7, 8, 9)
    assert (record.sent_s, record.finished_s, record.due_s) == (1.0, 2.0, 0.5)
    assert record.cached_tokens == 8 and record.finish_reason == "length"
    assert record.decision == {"prefill_worker": "prefill_0", "step": 1}


def test_a_rejection_is_recorded_with_its_reason_not_as_an_error() -> None:
    record = record_of(ScriptedClient(error=Rejected("ttft", "too slow", 2.0)))
    assert (record.outcome, record.kind, record.retry_after_s) == (REJECTED, "ttft", 2.0)


def test_an_answer_that_breaks_off_has_failed_and_keeps_its_tokens() -> None:
    record = record_of(
        ScriptedClient(TokenEvent(1.5, (7,)), error=ServerError("unreachable", "gone"))
    )
    assert (record.outcome, record.kind, record.output_ids) == (FAILED, "unreachable", (7,))


def test_what_does_not_fit_is_refused_with_a_scale_that_does() -> None:
    rows = read_trace(SETTINGS.path)
    server = dataclasses.replace(SERVER, context_tokens_max=1_024)
    with pytest.raises(ReplayRefused, match="All fit at --length-scale") as refused:
        prepare(rows, server, SETTINGS)
    offered = float(str(refused.value).split("--length-scale ")[-1].rstrip("."))
    assert prepare(rows, server, dataclasses.replace(SETTINGS, length_scale=offered)).planned


def served(run: ReplayRun) -> ReplayRun:
    """As if every request had been served at once, from a perfect cache."""
    ideal = dict(
        enumerate(ideal_of(dataclasses.replace(run, records=_records(run, {})), 64).values())
    )
    return dataclasses.replace(run, records=_records(run, ideal), started=len(run.planned))


def _records(run: ReplayRun, cached: dict[int, int]):
    return [
        dataclasses.replace(
            record_of(ScriptedClient(TokenEvent(2.0, (1,), finish_reason="length"))),
            index=request.index,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=cached.get(request.index),
        )
        for request in run.planned
    ]


def test_a_perfect_cache_reaches_the_ideal_and_the_traces_own_hit_rate() -> None:
    run = served(prepare(read_trace(SETTINGS.path), SERVER, SETTINGS))
    summary = summarize(run.records, ideal_of(run, 64))
    assert summary.cached_over_ideal == 1.0
    # 200 of 300 references hit, two of them the partial last block of a prompt sent again.
    assert summary.cached_tokens == 198 * 64
    assert summary.hit_rate == pytest.approx(0.7, abs=0.02)


def test_the_summary_is_one_json_line_and_one_line_per_request(tmp_path: Path) -> None:
    run = served(prepare(read_trace(SETTINGS.path, 5), SERVER, SETTINGS))
    ideal = ideal_of(run, 64)
    line = json.loads(json.dumps(json_line(run, summarize(run.records, ideal), SETTINGS)))
    assert (line["name"], line["planned"], line["cancelled"]) == ("replay", 5, 0)
    assert line["cached_over_ideal"] in (1.0, None)
    write_rows(tmp_path / "rows.jsonl", run, ideal)
    rows = [json.loads(text) for text in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0]["ideal_cached_tokens"] == 0 and rows[0]["ttft_s"] == 1.0


def test_the_tables_print_every_number_and_warn_of_a_late_sender() -> None:
    run = served(prepare(read_trace(SETTINGS.path, 5), SERVER, SETTINGS))
    late = [dataclasses.replace(record, due_s=record.sent_s - 5) for record in run.records]
    late[0] = dataclasses.replace(late[0], outcome=REJECTED, kind="ttft")
    late[1] = dataclasses.replace(late[1], outcome=FAILED, kind="timeout")
    text = printed(summarize(late, ideal_of(run, 64)))
    for expected in ("3 of 5 requests completed", "TTFT", "unlimited cache", "sender lag"):
        assert expected in text
    assert "The sender was late" in text and "timeout" in text and "ttft" in text
    assert "0 of 0 requests completed" in printed(summarize([]))


def printed(summary: Summary) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tables.summary_tables(summary))
    return console.export_text()


def test_a_wrong_trace_ends_the_command_before_it_asks_for_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(path)])
    assert ended.value.code == 1
    assert f"{path}:1: timestamp must be" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"\x1f\x8b\x08", b"[" * 100_000, "{}".encode("utf-16")])
@pytest.mark.parametrize("name", ["replay", "plan", "simulate"])
def test_bytes_that_are_no_trace_end_each_command_with_one_line(
    name: str, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my_trace.jsonl"
    path.write_bytes(data)
    given = {
        "replay": [str(path)],
        "plan": [
            "--trace",
            str(path),
            "--hardware",
            "H100",
            "--model",
            "Llama-3-8B",
            "--slo-ttft",
            "10",
            "--slo-tbt",
            "0.1",
            "--out",
            str(tmp_path / "plan"),
        ],
        "simulate": ["--experiment", "hit-rate", "--traces", str(tmp_path), "--trace", "my"],
    }
    with pytest.raises(SystemExit) as ended:
        main([name, *given[name]])
    assert ended.value.code in (1, 2)
    [line] = "".join(capsys.readouterr()).strip().splitlines()
    assert line.startswith(f"cannot {name}: {path}:1: ")


def test_a_scale_of_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(SETTINGS.path), "--length-scale", "0"])
    assert ended.value.code == 2
    assert "must be a positive number" in capsys.readouterr().err


def test_the_key_is_for_openais_interface_and_its_own_page_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mk-secret")
    begun: list[SendOptions] = []

    def keep(settings: object, sending: SendOptions, *_: object) -> int:
        begun.append(sending)
        return 0

    monkeypatch.setattr(command, "carry_out", keep)
    for via in ("grpc", "http", "openai"):
        with pytest.raises(SystemExit):
            main(["replay", str(SETTINGS.path), "--via", via])
    assert [sending.key for sending in begun] == ["", "", "mk-secret"]
    assert command.page_key(begun[2], "http://127.0.0.1:9000/metrics") == "mk-secret"
    for sending in begun:
        assert command.page_key(sending, "http://127.0.0.1:8002/metrics") == ""


def test_the_command_line_wins_over_the_server_and_the_rest_is_assumed_by_name() -> None:
    said = {"block_tokens": 128, "context_tokens_max": "4096", "special_token_ids": [0, 1]}
    found = description({"block_tokens": 32, "context_tokens_max": None}, said)
    assert (found.block_tokens, found.context_tokens_max) == (32, 4_096)
    assert found.assumed == ("vocabulary_tokens",)
    assert found.special_token_ids == (0, 1)


def test_the_recording_of_a_run_holds_what_a_report_needs() -> None:
    run = served(prepare(read_trace(SETTINGS.path, 5), SERVER, SETTINGS))
    run.records.reverse()  # as they ended
    outputs = ReplayOutputs(report=Path("run.html"), metrics_url="http://x/metrics", slo=Slo(1.0))
    samples = [Sample(0.0, {"mooncake_a": 1.0})]
    started_at = datetime(2025, 1, 1, tzinfo=timezone.utc)
    found = recording_of(run, SETTINGS, OPTIONS, outputs, ideal_of(run, 64), samples, started_at)
    assert from_bytes(to_bytes(found)) == found
    assert [record.index for record in found.requests] == [0, 1, 2, 3, 4]
    assert (found.started_at, found.slo) == ("2025-01-01T00:00:00+00:00", Slo(1.0))
    assert found.settings["trace"] == SETTINGS.path.name, "a file's folder is nobody's business"
    assert found.settings["metrics_url"] == "http://x/metrics"
    assert summarize(found.requests, found.ideal_cached_tokens) == summarize(
        run.records, ideal_of(run, 64)
    )


def test_goodput_is_in_the_json_line_only_when_a_level_was_given() -> None:
    run = served(prepare(read_trace(SETTINGS.path, 5), SERVER, SETTINGS))
    summary = summarize(run.records)
    assert "goodput" not in json_line(run, summary, SETTINGS)
    line = json_line(run, summary, SETTINGS, Slo(ttft_s=0.5))
    assert line["slo"] == {"ttft_s": 0.5, "tbt_s": None}
    assert line["goodput"]["requests"] == 0, "every TTFT is 1 s"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--slo-ttft-s", "0"], "--slo-ttft-s is 0.0; it must be a positive number"),
        (["--slo-tbt-s", "nan"], "--slo-tbt-s is nan; it must be a positive number"),
        (["--report", "x.html", "--url", "localhost"], "'localhost' is not a gRPC address"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(SETTINGS.path), *options])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert why in said


def test_the_page_to_sample_follows_from_the_servers_address_unless_told() -> None:
    assert address_of_page(None, "10.0.0.1:8001") == "http://10.0.0.1:8002/metrics"
    assert address_of_page("http://proxy/m", "10.0.0.1:8001") == "http://proxy/m"
    assert address_of_page("none", "nowhere") is None
