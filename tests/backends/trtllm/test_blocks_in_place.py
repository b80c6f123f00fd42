"""Workers on TensorRT-LLM leave blocks of their own node where they are, leased until copied."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backends.engine.connected import host_memory
from backends.engine.connected.copier import HostCopier
from backends.engine.connected.messages import ENVIRONMENT
from backends.errors import KvMissing
from backends.workers import worker as worker_module
from tests.backends.workers.pair import WAIT_S, Asked, Pair, pairs, prompt
from tests.e2e.trtllm import expected

BLOCK = 64


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    request.getfixturevalue("fake_package")
    monkeypatch.setenv(ENVIRONMENT, "")
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(host_memory, "SHM", shm)
    parameters = {
        "engine": "tensorrt_llm",
        "page_tokens": "32",
        "handoff": "store",
        "aside_load_mib": "1",
    }
    for pair in pairs(tmp_path, monkeypatch, **parameters):
        wait_until_attached(pair)
        yield pair
        pair.wait_until_idle()
        for driver in drivers(pair):
            driver._regions.check()
            assert not driver._placed._slots


def drivers(pair: Pair) -> list[Any]:
    return [pair.prefill.driver, pair.decode.driver]


def wait_until_attached(pair: Pair) -> None:
    for driver in drivers(pair):
        driver._regions.look()  # as its turns do
        (region,) = driver._regions._regions.values()
        region.attached.result(WAIT_S)


def only_in_the_store(pair: Pair, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's blocks; the engines have nothing of it any more."""
    from tensorrt_llm._fake.blocks import BlockManager

    pair.ask(ids, max_tokens=1).wait()
    pair.wait_until_idle()
    monkeypatch.setattr(BlockManager, "match", lambda *_: [])


def poison(pair: Pair) -> None:
    """What is in the staging pools is right for nobody."""
    for driver in drivers(pair):
        driver.engine.kv_pool[:] = 0xEE


def test_a_cached_prefix_and_a_hand_over_come_out_of_slots(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(1, 12 * BLOCK + 5)
    only_in_the_store(pair, ids, monkeypatch)
    poison(pair)
    loaded = heard_of(pair, monkeypatch)
    reads: list[int] = []
    for worker in (pair.prefill, pair.decode):
        read = worker.process.store.read

        def counted(copies: Any, *given: Any, read: Any = read) -> Any:
            reads.append(len(copies))
            return read(copies, *given)

        monkeypatch.setattr(worker.process.store, "read", counted)
    assert pair.ask(ids).wait() == expected(ids, 8)
    pair.wait_until_idle()
    assert loaded == ["prefill", "decode"]
    assert all(blocks == 1 for blocks in reads), "only the block that decode goes on in is copied"


def heard_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which workers' engines have loaded something."""
    said: list[str] = []
    for driver in drivers(pair):
        loaded, role = driver.loaded, driver.engine.role

        def heard(request_id: str, loaded: Any = loaded, role: str = role) -> None:
            said.append(role)
            loaded(request_id)

        monkeypatch.setattr(driver, "loaded", heard)
    return said


def test_what_a_prompt_computes_is_saved_into_slots(pair: Pair) -> None:
    poison(pair)
    for tokens in (12 * BLOCK + 5, 2 * BLOCK - 1, 40):  # also a block that ends in whole pages
        ids = prompt(5, tokens)
        assert pair.ask(ids, max_tokens=1).wait() == expected(ids, 1)
        assert pair.ask(ids).wait() == expected(ids, 8), "what decode read was not that"
        pair.wait_until_idle()
    assert (pair.prefill.driver.engine.kv_pool == 0xEE).all(), "it went through the pool"


def test_what_finds_no_slot_goes_through_the_pool(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(pair)
    monkeypatch.setattr(pair.prefill.writer, "allocate_now", lambda *_, **__: None)
    ids = prompt(6, 3 * BLOCK + 5)
    assert pair.ask(ids).wait() == expected(ids, 8)
    assert not (pair.prefill.driver.engine.kv_pool == 0xEE).all()


@dataclass
class HeldCopy:
    """A request is stopped while an engine copies its blocks out of slots."""

    asked: Asked
    worker: Any
    go_on: threading.Event
    leases: Any
    leases_at_end: list[bool]  # whether the request had leases when its call ended


@pytest.fixture(params=["prefill", "decode"])
def held(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[HeldCopy]:
    ids = prompt(2, 12 * BLOCK + 5)  # more than a MiB
    only_in_the_store(pair, ids, monkeypatch)
    begun, go_on = threading.Event(), threading.Event()
    is_slow = {"prefill": 1, "decode": 2}[request.param]
    loads: list[int] = []
    load = HostCopier.load_aside

    def slow(self: HostCopier, runs: Any, after: Any) -> None:
        loads.append(len(runs))
        if len(loads) == is_slow:
            begun.set()
            go_on.wait(WAIT_S)
        load(self, runs, after)

    monkeypatch.setattr(HostCopier, "load_aside", slow)
    asked, leases = Asked(pair, "r", ids, max_tokens=4), pair.directory.directory._copies.leases
    at_end: list[bool] = []
    end = asked._is_over.set
    monkeypatch.setattr(asked._is_over, "set", lambda: (at_end.append("r" in leases), end()))
    pair.submit(asked)
    try:
        assert begun.wait(WAIT_S)
        for worker in (pair.prefill, pair.decode):
            worker.stop(asked.request_id)
        yield HeldCopy(asked, getattr(pair, request.param), go_on, leases, at_end)
    finally:
        go_on.set()


def test_the_call_of_a_request_that_is_stopped_ends_behind_its_copies(
    pair: Pair, held: HeldCopy
) -> None:
    """Its frontend then releases the leases, so that others may get the slots."""
    with held.worker.lock:
        assert held.worker.lock.wait_for(lambda: not held.worker.jobs, WAIT_S)
    assert not held.leases_at_end, "a copy may still read its slots"
    held.go_on.set()
    held.asked.wait_over()
    assert held.leases_at_end == [False]
    pair.wait_until_idle()
    (node,) = pair.directory.stats().nodes
    assert (node.writing_blocks, node.quarantined_units) == (0, 0), "unfilled slots rest"


def test_a_call_does_not_wait_for_ever_for_copies_and_leases_do(
    pair: Pair, held: HeldCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "COPIES_S_MAX", 0.2)
    held.asked.wait_over()
    assert held.leases_at_end == [True], "a copy may still read its slots"
    held.go_on.set()
    pair.wait_until_idle()
    assert "r" not in held.leases


def test_the_next_incarnation_of_the_node_takes_the_place_of_the_one_that_died(pair: Pair) -> None:
    ids = prompt(3, 3 * BLOCK + 5)
    assert pair.ask(ids).wait() == expected(ids, 8)
    pair.wait_until_idle()
    pair.restart_node()
    for worker in (pair.prefill, pair.decode):
        worker.process.store.allocate([b"x" * 16], "nobody", 1.0)  # it notices
    wait_until_attached(pair)
    for _ in ("a miss", "a hit"):
        assert pair.ask(ids).wait() == expected(ids, 8)
        pair.wait_until_idle()


def test_a_hand_over_whose_lease_ran_out_before_its_request_came_ends_that_request_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frontend stood still; what was read ahead is another's by now."""
    ids = prompt(4, 12 * BLOCK + 5)
    only_in_the_store(pair, ids, monkeypatch)
    lost: list[str] = []
    monkeypatch.setattr(pair.decode.process, "lose", lost.append)
    driver = pair.decode.driver
    placed, start = driver._placed, driver.start

    def late(job: Any) -> None:
        assert len(placed._slots) >= 12
        view = pair.decode.process.store._local.segment.view
        for slot in list(placed._slots.values()):
            first = slot.block.headers_offset_bytes
            view[first : first + len(slot.block.first)] = 0xEE
        start(job)

    monkeypatch.setattr(driver, "start", late)
    assert isinstance(pair.ask(ids).wait_failed(), KvMissing)
    assert not lost
