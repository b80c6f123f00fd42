"""Who is told that a worker is gone, and since when nobody has heard of it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.errors import InvalidRequest
from backends.frontend import cluster_view
from backends.frontend.cluster_view import ClusterView, HotCopies
from backends.frontend.decisions.latest import Decided
from conductor.messages import Reject, Replicate
from mooncake_store.errors import StoreUnavailable
from mooncake_store.records.events import NodeUp, Snapshot, WorkerDown, WorkerReported, WorkerUp
from tests.backends.frontend.conftest import Clock
from tests.conductor.fleet import node, prompt, report, worker


def test_a_worker_that_is_gone_was_heard_of_with_its_last_report(
    view: ClusterView, clock: Clock
) -> None:
    gone: list[tuple[str, str, float]] = []
    view.on_worker_down = lambda *lost: gone.append(lost)
    info = worker("d0", "decode", "s0")
    view._on_events([WorkerUp(info)])
    clock.now_s = 107.0
    view._on_events([WorkerReported(report("d0", info.incarnation))])
    clock.now_s = 112.5
    view._on_events([WorkerDown("d0", info.incarnation)])
    assert gone == [("d0", info.incarnation, 107.0)]


def test_a_report_that_comes_behind_the_end_of_its_worker_is_not_kept(view: ClusterView) -> None:
    info = worker("d0", "decode", "s0")
    down = WorkerDown("d0", info.incarnation)
    view._on_events([WorkerUp(info), down, WorkerReported(report("d0", info.incarnation))])
    assert not view._seen_s


def test_workers_that_serve_are_known_by_what_they_have_in_common(view: ClusterView) -> None:
    assert view.served() is None
    workers = [worker("p0", "prefill", "s0"), worker("d0", "decode", "s0")]
    view._on_events([WorkerUp(each) for each in workers])
    served = view.served()
    assert served is not None and served.workers == ("d0", "p0")
    assert served.fingerprint == workers[0].fingerprint
    assert view.workers_live("prefill") == view.workers_live("decode") == 1
    assert view.inboxes("p0") == [workers[0].inbox]
    assert view.grpc_addresses() == {each.grpc_address for each in workers}
    assert view.excluded_by_pins("", "") == frozenset()
    with pytest.raises(InvalidRequest, match=r"prefill_worker 'p7' is not serving"):
        view.excluded_by_pins("p7", "")


def test_a_named_worker_leaves_out_all_others_of_its_role(view: ClusterView) -> None:
    names = ("p0", "p1", "p2")
    view._on_events([WorkerUp(worker(name, "prefill", "s0")) for name in names])
    excluded = {name for name, _ in view.excluded_by_pins("p1", "")}
    assert excluded == {"p0", "p2"}


def test_leases_are_left_to_run_out_where_no_directory_answers(view: ClusterView) -> None:
    def fail(owner: str) -> None:
        raise StoreUnavailable("the directory is down")

    view.client = SimpleNamespace(release=fail, close=lambda: None)  # type: ignore[assignment]
    view.release("r-1")


def test_a_worker_that_a_new_directory_never_hears_of_was_heard_of_before_that(
    view: ClusterView, clock: Clock
) -> None:
    info = worker("d0", "decode", "s0")
    view._on_events([WorkerUp(info)])
    clock.now_s = 130.0
    view._on_snapshot(Snapshot(2, 0, (), (), (), ()))
    assert view._take_missing(134.0) == []
    assert view._take_missing(136.0) == [("d0", info.incarnation, 100.0)]
    assert view._take_missing(140.0) == []


def test_a_frontend_waits_for_a_worker_of_each_role(view: ClusterView, clock: Clock) -> None:
    coming = [worker("p0", "prefill", "s0"), worker("d0", "decode", "s0")]
    clock.on_sleep = lambda: view._on_events([WorkerUp(coming.pop(0))])
    assert view.wait_for_a_pair(60.0, lambda: False)
    assert not coming, "it waited for both"


def test_a_frontend_waits_no_longer_than_it_was_told_nor_while_all_ends(
    view: ClusterView, clock: Clock
) -> None:
    view._on_events([WorkerUp(worker("p0", "prefill", "s0"))])
    assert not view.wait_for_a_pair(60.0, lambda: False)
    assert clock.now_s == pytest.approx(160.0, abs=0.1)
    assert not view.wait_for_a_pair(60.0, lambda: True)
    assert clock.now_s == pytest.approx(160.0, abs=0.1)


def test_while_the_directory_is_silent_workers_are_not_taken_for_silent(
    view: ClusterView, clock: Clock
) -> None:
    """For a change of leader: longer than that, nobody knows anything of them."""
    for role in ("prefill", "decode"):
        view._on_events([NodeUp(node("s0")), WorkerUp(worker(role, role, "s0"))])
    began_s = clock.now_s
    view._feed.silent_s = lambda: clock.now_s - began_s  # type: ignore[method-assign]
    decided: dict[float, bool] = {}
    for _ in range(30):
        clock.now_s += 0.5
        view._tick(0.5)
        found = view.decide(prompt("r", prompt_tokens=10))
        view.finished("r")
        decided[clock.now_s - began_s] = isinstance(found, Decided)
        view._check()
    until_s = cluster_view.DIRECTORY_SILENT_S_MAX
    assert all(is_routed for at_s, is_routed in decided.items() if at_s < until_s)
    assert not decided[max(decided)]


def test_a_worker_that_is_silent_while_the_directory_speaks_gets_no_request(
    view: ClusterView, clock: Clock
) -> None:
    for role in ("prefill", "decode"):
        view._on_events([NodeUp(node("s0")), WorkerUp(worker(role, role, "s0"))])
    view._feed.silent_s = lambda: 0.4  # type: ignore[method-assign]
    for _ in range(7):
        clock.now_s += 0.5
        view._tick(0.5)
    assert isinstance(view.decide(prompt("r", prompt_tokens=10)), Reject)


def test_a_later_stage_of_a_pipeline_group_cannot_be_asked_for(view: ClusterView) -> None:
    stages = [
        worker(f"p{number}", "prefill", "s0", pipeline_group="g", pipeline_stage=number)
        for number in range(2)
    ]
    view._on_events([WorkerUp(info) for info in stages])
    with pytest.raises(InvalidRequest, match=r"prefill_worker 'p1' is not serving.*\['p0'\]"):
        view.excluded_by_pins("p1", "")
    assert view.excluded_by_pins("p0", "") == {("p1", "w1")}


def test_a_worker_that_registers_and_dies_between_two_ticks_is_reported_down_once(
    view: ClusterView, clock: Clock
) -> None:
    gone: list[str] = []
    view.on_worker_down = lambda name, *_: gone.append(name)
    info = worker("d0", "decode", "s0")
    view._on_events([WorkerUp(info)])
    view._on_snapshot(Snapshot(2, 0, (), (), (), ()))
    view._on_events([WorkerUp(info), WorkerDown("d0", info.incarnation)])
    clock.now_s += 60.0
    view._tick(0.5)
    assert gone == ["d0"]


def test_a_failed_tick_does_not_end_the_ticks(
    view: ClusterView, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[float] = []

    def fail(seconds: float) -> None:
        ticks.append(seconds)
        if len(ticks) == 2:
            view._is_closing.set()
        raise ValueError("no event may end the ticks")

    monkeypatch.setattr(cluster_view, "TICK_S", 0.001)
    monkeypatch.setattr(view, "_tick", fail)
    view._tick_loop()
    assert len(ticks) == 2


def test_close_drops_the_copies_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    is_copying, may_end = threading.Event(), threading.Event()

    def copy(_: HotCopies, suggestion: Replicate) -> None:
        copied.append(suggestion.target_node)
        is_copying.set()
        may_end.wait(10.0)

    monkeypatch.setattr(HotCopies, "_copy", copy)
    copies = HotCopies(f"ipc://{tmp_path}/d")
    for name in ("b", "c", "d"):
        copies.carry_out(Replicate((), "a", name, "hot"))
    assert is_copying.wait(10.0)
    threading.Timer(0.2, may_end.set).start()
    copies.close()
    assert copied == ["b"]
