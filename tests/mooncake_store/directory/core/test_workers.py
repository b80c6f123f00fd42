"""Workers: one fingerprint for all, two incarnations at once, gone when silent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import FingerprintMismatch, RequestInvalid, StoreFull
from mooncake_store.records.events import WorkerDown, WorkerReported, WorkerUp
from tests.mooncake_store.makers import LAYOUT, report, worker_info


def test_a_misfit_is_refused_and_told_which_fields_differ() -> None:
    directory = Directory(1)
    directory.register_worker(worker_info("prefill_0"), 0.0)
    misfit = worker_info("decode_0", layout=replace(LAYOUT, block_tokens=32), weights_id="v2")
    with pytest.raises(FingerprintMismatch) as refusal:
        directory.register_worker(misfit, 0.0)
    assert str(refusal.value) == (
        "worker decode_0 does not fit worker prefill_0: weights_id is v2, theirs is v1, and "
        "block_tokens is 32, theirs is 16. Give both the same checkpoint and KV settings, or stop "
        "the other one first."
    )
    assert [info.worker_id for info in directory.workers(0.0)] == ["prefill_0"]


@pytest.mark.parametrize(
    "measured",
    [
        {"prefill_coefficients": (0.1, math.nan, 0.0)},
        {"decode_coefficients": (math.inf, 0.0, 0.0)},
        {"transfer_bytes_per_s": {"a": math.nan}},
        {"transfer_latency_s": {"a": -math.inf}},
        {"pipeline_hop_s": math.nan},
        {"load_beside_share": math.nan},
        {"load_beside_share": 1.0},
        {"load_beside_share": -0.1},
    ],
    ids=lambda measured: next(iter(measured)),
)
def test_a_worker_whose_measurements_are_no_numbers_is_refused(measured: dict[str, Any]) -> None:
    directory = Directory(1)
    with pytest.raises(RequestInvalid, match=next(iter(measured))):
        directory.register_worker(replace(worker_info("prefill_0"), **measured), 0.0)
    assert directory.workers(0.0) == []


def test_a_dead_worker_does_not_block_a_new_kind() -> None:
    directory = Directory(1)
    directory.register_worker(worker_info("prefill_0"), 0.0)
    misfit = worker_info("decode_0", weights_id="v2")
    directory.register_worker(misfit, 5.1)  # prefill_0 is silent for longer than 5 s
    directory.tick(5.1)
    assert directory.workers(5.1) == [misfit]


def test_the_old_life_of_a_reloaded_worker_leaves_without_the_new_one() -> None:
    directory = Directory(1)
    directory.register_worker(worker_info(incarnation="w1"), 0.0)
    directory.register_worker(worker_info(incarnation="w2"), 1.0)
    assert [info.incarnation for info in directory.workers(1.0)] == ["w1", "w2"]
    assert directory.deregister_worker("prefill_0", "w1", 2.0)
    assert not directory.deregister_worker("prefill_0", "w1", 2.0)
    directory.check()
    assert [info.incarnation for info in directory.workers(2.0)] == ["w2"]
    assert directory.worker_report(report(incarnation="w2"), 2.0)
    assert not directory.worker_report(report(incarnation="w1"), 2.0)


def test_a_reload_of_the_only_worker_may_change_its_fingerprint() -> None:
    directory = Directory(1)
    directory.register_worker(worker_info(incarnation="w1"), 0.0)
    directory.register_worker(worker_info(incarnation="w2", weights_id="v2"), 0.0)
    with pytest.raises(FingerprintMismatch):  # the old incarnation still serves the old weights
        directory.register_worker(worker_info("decode_0", weights_id="v2"), 0.0)
    directory.deregister_worker("prefill_0", "w1", 1.0)
    directory.register_worker(worker_info("decode_0", weights_id="v2"), 1.0)


def test_reports_are_kept_and_passed_on() -> None:
    directory = Directory(1)
    info = worker_info()
    directory.register_worker(info, 0.0)
    directory.worker_report(report(running=3), 1.0)
    directory.worker_report(report(running=4), 2.0)
    assert directory.events_since(0) == [
        WorkerUp(info),
        WorkerReported(report(running=3)),
        WorkerReported(report(running=4)),
    ]
    assert directory.snapshot(2.0).reports == (report(running=4),)


@pytest.mark.parametrize(
    "took", [{"step_s": math.nan}, {"oldest_step_s": math.inf}], ids=lambda took: next(iter(took))
)
def test_a_report_whose_times_are_no_numbers_is_refused_and_is_no_sign_of_life(
    took: dict[str, float],
) -> None:
    directory = Directory(1)
    directory.register_worker(worker_info(), 0.0)
    with pytest.raises(RequestInvalid, match=next(iter(took))):
        directory.worker_report(replace(report(), **took), 3.0)
    assert directory.snapshot(3.0).reports == ()
    directory.tick(5.1)
    assert directory.workers(5.1) == []


def test_a_worker_that_stops_reporting_is_down_after_five_seconds() -> None:
    directory = Directory(1)
    directory.register_worker(worker_info(), 0.0)
    directory.worker_report(report(), 1.0)
    directory.tick(6.0)
    assert len(directory.workers(6.0)) == 1
    directory.tick(6.1)
    directory.check()
    assert directory.workers(6.1) == []
    assert directory.events_since(directory.sequence - 1) == [WorkerDown("prefill_0", "w1")]
    assert not directory.worker_report(report(), 6.2), "it must register again"


def test_registering_again_changes_nothing_but_what_changed() -> None:
    directory = Directory(1)
    directory.register_worker(worker_info(), 0.0)
    directory.worker_report(report(), 0.5)
    directory.register_worker(worker_info(), 1.0)
    assert directory.sequence == 2
    faster = replace(worker_info(), transfer_bytes_per_s={"s0": 9e9})
    directory.register_worker(faster, 1.0)
    assert directory.events_since(2) == [WorkerUp(faster)]
    assert directory.snapshot(1.0).reports == (report(),)


def test_the_number_of_workers_is_bounded() -> None:
    directory = Directory(1, DirectoryConfig(workers_max=1))
    directory.register_worker(worker_info("a"), 0.0)
    with pytest.raises(StoreFull, match="workers_max"):
        directory.register_worker(worker_info("b"), 0.0)
