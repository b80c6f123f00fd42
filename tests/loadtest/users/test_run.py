"""Records on their way from a worker to its master, and in one order in the end."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from loadtest.results.metrics import COMPLETED, RequestRecord
from loadtest.users.run import RunBeginning, RunClock, RunRecords, RunReport, UserRun
from loadtest.users.settings import add_options, settings_of
from loadtest.users.text import ServerFacts
from loadtest.users.trace_share import TraceProgress

SILENT: Any = None  # nothing is sent here


def record(due_s: float, request_id: str = "r", index: int = 0) -> RequestRecord:
    return RequestRecord(
        index,
        request_id,
        due_s,
        due_s,
        due_s + 1,
        10,
        3,
        COMPLETED,
        token_times_s=(due_s + 0.1, due_s + 0.2),
        decision={"prefill": "prefill_0", "a": {"b": 1}},
        workload="chat",
    )


def test_a_report_arrives_as_it_left() -> None:
    report = RunReport("run", [record(0.5), record(1 / 3)], 2, TraceProgress(7, 1))
    assert RunReport.unpacked(report.packed()) == report


def test_a_worker_hears_of_a_run_what_its_master_says() -> None:
    facts = ServerFacts(64, 8_192, 2_048, (0, 1), ("block_tokens",), bytes_per_token=3.25)
    beginning = RunBeginning("run", 1_700_000_000.25, facts, ["one", "other"])
    assert RunBeginning.unpacked(beginning.packed()) == beginning


def test_what_was_handed_over_is_not_handed_over_again() -> None:
    records = RunRecords()
    records.all.append(record(1.0))
    records.cancelled = 1
    assert records.take() == ([record(1.0)], 1)
    assert records.take() == ([], 0)


def test_a_master_has_all_records_in_the_order_in_which_they_were_due() -> None:
    records = RunRecords()
    records.merge(RunReport("run", [record(3.0), record(1.0)], 1))
    records.merge(RunReport("run", [record(2.0)], 2))
    ordered = records.in_order(keep_index=False)
    assert [(r.index, r.due_s) for r in ordered] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert records.cancelled == 3


def test_rows_of_a_trace_keep_their_index() -> None:
    records = RunRecords()
    records.merge(RunReport("run", [record(3.0, index=9), record(1.0, index=4)], 0))
    assert [r.index for r in records.in_order(keep_index=True)] == [4, 9]


def test_a_few_users_of_several_workloads_are_of_several_tenants() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = vars(parser.parse_args(["--workload", "chat,decode", "--tenants", "acme,batch"]))
    settings, facts = settings_of(options, None), ServerFacts(64, 8_192, 2_048)
    run = UserRun("run", settings, facts, RunClock(0.0), SILENT, environment=None)
    users = [run.identify(name) for name in ("chat", "decode", "chat", "decode")]
    assert [user.group for user in users] == [
        "acme/chat",
        "batch/decode",
        "batch/chat",
        "acme/decode",
    ]
    assert [user.name for user in users] == ["1", "1", "2", "2"]


def tenants_dealt(mix: str, tenants: str, workers: int, users: int) -> Counter[str]:
    """Groups of users that are dealt to workers in turn, as Locust deals them."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = vars(parser.parse_args(["--workload", mix, "--tenants", tenants]))
    settings, facts = settings_of(options, None), ServerFacts(64, 8_192, 2_048)
    runs = [
        UserRun("run", settings, facts, RunClock(0.0), SILENT, None, part=part, parts=workers)
        for part in range(workers)
    ]
    names = list(settings.mix)
    return Counter(
        runs[user % workers].identify(names[user % len(names)]).group for user in range(users)
    )


def test_tenants_have_their_shares_of_users_that_several_workers_run() -> None:
    for workers in (1, 2, 3, 4, 8):
        for users in (4, 12, 40):
            shares = tenants_dealt("chat", "acme:1,batch:1", workers, users)
            assert shares == {"acme/chat": users // 2, "batch/chat": users // 2}, (workers, users)
        shares = tenants_dealt("chat", "acme:3,batch:1", workers, 24)
        assert shares == {"acme/chat": 18, "batch/chat": 6}, workers
        shares = tenants_dealt("chat,decode", "acme,batch", workers, 24)
        assert set(shares.values()) == {6} and len(shares) == 4, workers
