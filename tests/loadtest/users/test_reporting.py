"""The line that says how a run goes, and what is made of it at its end."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.client.protocol import GenerateRequest, TokenEvent
from loadtest.replay.prompts import TokenSource, plan
from loadtest.replay.reuse import ideal_cached_tokens
from loadtest.replay.trace import read_trace
from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord, Slo
from loadtest.users.reporting import EndedRun, ProgressLine
from loadtest.users.run import RunClock, UserRun
from loadtest.users.settings import add_options, settings_of
from loadtest.users.text import ServerFacts
from loadtest.users.verdict import Unloaded

TRACE = Path(__file__).parents[2] / "data" / "conversation_turns.jsonl"
ROWS = read_trace(TRACE, 12)
FACTS = ServerFacts(64, 131_072, 2_048, (), bytes_per_token=3.0)


class Silent:
    """Nothing is sent here."""

    def send(self, request: GenerateRequest, timeout_s: float) -> Iterator[TokenEvent]:
        raise AssertionError("the run has ended")

    def close(self) -> None:
        pass


def record(outcome: str = COMPLETED, ttft_s: float = 0.1) -> RequestRecord:
    times = (ttft_s, ttft_s + 0.02) if outcome == COMPLETED else ()
    return RequestRecord(
        0, "r", 0.0, 0.0, ttft_s + 1.0, 10, 2, outcome, token_times_s=times, workload="chat"
    )


def test_counts_are_of_the_whole_run_and_percentiles_of_what_is_new() -> None:
    progress, records = ProgressLine(), [record(), record(REJECTED)]
    assert progress.of(records, 10.0, 5) == (
        "10 s: 5 users, 1 answered, 1 rejected, 0 failed; "
        "of the last: TTFT P90 100 ms, TBT P90 20 ms"
    )
    assert progress.of(records, 20.0, 5) == "20 s: 5 users, 1 answered, 1 rejected, 0 failed"
    records.append(record(ttft_s=0.3))
    assert "2 answered, 1 rejected" in (line := progress.of(records, 30.0, 5))
    assert "TTFT P90 300 ms" in line


def ended(records: list[RequestRecord], **options: object) -> EndedRun:
    parser = argparse.ArgumentParser()
    add_options(parser)
    settings = settings_of(vars(parser.parse_args([])) | options, "127.0.0.1:8001")
    run = UserRun("run", settings, FACTS, RunClock(1_700_000_000.0), Silent(), environment=None)
    run.records.all += records
    unloaded = {name: Unloaded(0.02, 0.005, 3) for name in settings.mix}
    return EndedRun(run=run, rows=ROWS, unloaded=unloaded, samples=[], users=2)


def test_the_recording_of_users_has_a_level_for_each_workload_and_what_it_was_made_from() -> None:
    unequal = {"chat": Slo(0.2, 0.025), "document": Slo(4.0, 0.025)}
    found = ended([record()], workload="chat,document").recording([record()], unequal)
    assert found.slo is None and found.slo_by_workload == unequal
    assert found.settings["unloaded_ttft_s of chat"] == 0.02
    assert (found.settings["users"], found.settings["cancelled"]) == (2, 0)
    assert found.started_at == "2023-11-14T22:13:20+00:00"
    assert found.title == "Locust: chat:1,document:1 to conductor at 127.0.0.1:8001"
    equal = {name: Slo(1.0) for name in unequal}
    assert ended([]).recording([record()], equal).slo == Slo(1.0)
    assert ended([]).recording([record()], {"chat": Slo()}).slo is None


def test_a_trace_is_compared_with_the_unlimited_cache_that_a_replay_is_compared_with() -> None:
    records = [dataclasses.replace(record(), index=index) for index in range(len(ROWS))]
    run = ended(records, workload="trace", trace=str(TRACE), length_scale=0.5, seed=7)
    found = run.recording(records[:5] + records[6:], {"trace": Slo()})
    prompts = [
        planned.prompt_ids for planned in plan(ROWS, TokenSource.of_server(FACTS, 7), 0.5, 1)
    ]
    ideal = ideal_cached_tokens(prompts[:5] + prompts[6:], FACTS.block_tokens)
    assert list((found.ideal_cached_tokens or {}).values()) == ideal and max(ideal) > 0
    assert 5 not in (found.ideal_cached_tokens or {})
    assert (found.settings["path"], found.settings["length_scale"]) == (TRACE.name, 0.5)
    assert "users" not in found.settings


def test_a_run_is_good_when_its_limits_were_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert ended([record()], workload="chat").is_good()
        assert not ended([record(ttft_s=5.0)], workload="chat").is_good()
    assert "met    chat: P90 TTFT 0.1 s" in caplog.text
    assert "MISSED chat: P90 TTFT 5 s" in caplog.text


def test_each_tenant_is_judged_by_itself_if_it_had_a_user(caplog: pytest.LogCaptureFixture) -> None:
    late = dataclasses.replace(record(ttft_s=9.0), workload="batch/chat")
    records = [dataclasses.replace(record(), workload="acme/chat"), late]
    run = ended(records, tenants="acme,batch,idle", workload="chat", slo_ttft_p90="10x")
    assert run.groups(records) == {"acme/chat": "chat", "batch/chat": "chat"}
    assert not run.is_good()
    warned = [line for line in caplog.messages if line.startswith("tenant ")]
    assert warned == ["tenant idle: none of its requests ended; it may need more users"]
    levels = {name: Slo(0.2, 0.025) for name in run.groups(records)}
    found = run.recording(records, levels | {"batch/chat": Slo(10.0, 0.025)})
    assert found.slo_by_workload.keys() == {"acme/chat", "batch/chat"}
    assert found.settings["tenants"] == "acme:1,batch:1,idle:1"
