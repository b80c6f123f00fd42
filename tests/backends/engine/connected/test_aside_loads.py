"""Large loads run beside the passes: nobody waits for another's, nothing is computed too early."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from backends.engine.connected import rank_copies
from backends.engine.connected.copier import HostCopier
from tests.backends.engine.connected.connected import Connected, Make, expected, filled, prompt_of
from tests.backends.engine.connected.listening import WAIT_S

LONG, SHORT = prompt_of(200), prompt_of(20, 2)
STEPS = 12  # of a request that generates meanwhile


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closed: no load aside goes on."""
    opened, load = threading.Event(), HostCopier.load_aside
    main = threading.current_thread()

    def load_when_open(self: HostCopier, runs: Any, after: Any) -> None:
        assert threading.current_thread() is main or opened.wait(WAIT_S)
        load(self, runs, after)

    monkeypatch.setattr(HostCopier, "load_aside", load_when_open)
    yield opened
    opened.set()


def loading(make: Make, **options: Any) -> tuple[Connected, list[int], Any]:
    """An engine that has a long prompt in the pool and was asked for it, and for a short one."""
    store = filled(make(**options), LONG)
    engine = make(aside_bytes_min=1, **options)
    pages = engine.stage("long", LONG, store, loaded_tokens=192)
    request = engine.submit(1, LONG, 3)
    return engine, pages, request


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("is_overlapping", [False, True])
def test_streams_go_on_while_a_large_prefix_is_loaded(
    make: Make, gate: threading.Event, tp_size: int, is_overlapping: bool
) -> None:
    options: dict[str, Any] = {"disable_overlap_scheduler": not is_overlapping}
    engine, pages, long = loading(make, tensor_parallel_size=tp_size, **options)
    short = engine.submit(2, SHORT, STEPS)
    for _ in range(STEPS + 3):
        engine.executor.step()
    assert engine.output(short) == expected(engine, SHORT, STEPS), "it waited for the other's load"
    assert engine.output(long) == [] and long.matched_tokens == 192
    gate.set()
    engine.executor.run_until_idle()
    assert engine.output(long) == expected(engine, LONG, 3)
    engine.unstage("long", pages)
    assert engine.all_free
    assert not engine.scheduler._aside


def test_a_small_prefix_is_loaded_in_its_own_pass(make: Make, gate: threading.Event) -> None:
    store = filled(make(), LONG)
    engine = make(aside_bytes_min=2**30)
    pages = engine.stage("long", LONG, store, loaded_tokens=192)
    request = engine.generate(1, LONG, 3)  # and the gate is closed
    assert request.matched_tokens == 192 and engine.output(request) == expected(engine, LONG, 3)
    engine.unstage("long", pages)


def test_what_is_loaded_aside_is_loaded_in_parts_and_saves_get_their_turn(
    make: Make, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_copies, "PART_BYTES_MAX", 1)  # a page at a time
    gate.set()
    engine, pages, request = loading(make)
    engine.executor.run_until_idle()
    assert engine.output(request) == expected(engine, LONG, 3)
    engine.unstage("long", pages)


@pytest.mark.parametrize("is_unstaged_first", [False, True])
def test_a_request_that_is_cancelled_while_it_is_loaded_keeps_its_pages_until_then(
    make: Make, gate: threading.Event, is_unstaged_first: bool
) -> None:
    engine, pages, request = loading(make)
    engine.executor.step()
    unstaged = engine.host.unstage("long", WAIT_S) if is_unstaged_first else None
    engine.executor.abort(request)
    for _ in range(3):
        engine.executor.step()
    blocks = engine.executor.blocks
    assert blocks.free_blocks < blocks.blocks, "they are written to"
    assert unstaged is None or not unstaged.done()
    gate.set()
    engine.executor.run_until_idle()
    assert blocks.free_blocks == blocks.blocks
    if unstaged is None:
        engine.unstage("long", pages)
    else:
        unstaged.result(WAIT_S)


def test_a_load_that_fails_is_never_called_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: HostCopier, runs: Any, after: Any) -> None:
        raise OSError("the bus is gone")

    engine, pages, request = loading(make)
    monkeypatch.setattr(HostCopier, "load_aside", fails)
    engine.executor.step()
    engine.heard.wait_for("broken", "rank 0 could not copy KV: the bus is gone")
    for _ in range(3):
        engine.executor.step()
    assert engine.output(request) == []
    engine.free_pages += pages
