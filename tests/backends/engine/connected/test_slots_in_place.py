"""Ranks copy straight from and to slots of the storage node: leased, with a node that may die, and
a lease that may be lost."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from backends.engine.connected import rank_copies
from backends.engine.connected.channel import ChannelError
from backends.engine.connected.copier import HostCopier
from mooncake_store.memory.segment import Segment
from tests.backends.engine.connected.connected import Connected, Make, expected, filled, prompt_of
from tests.backends.engine.connected.listening import WAIT_S
from tests.backends.engine.connected.test_aside_loads import gate as gate  # a fixture

LONG = prompt_of(200)
LOADED = 192


def staged(make: Make, **options: Any) -> tuple[Connected, list[int]]:
    """An engine that has the blocks of a long prompt in slots, and nothing of it in the pool."""
    store = filled(make(**options), LONG)
    engine = make(**options)
    engine.start_node()
    pages = engine.stage("long", LONG, store, LOADED, in_slots=True)
    assert len(engine.in_slots("long")) == LOADED // engine.block_tokens
    for page in pages:
        engine.page(page)[:] = 0xEE
    return engine, pages


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("aside_bytes_min", [0, 1])
def test_blocks_go_from_their_slots_into_the_engine(
    make: Make, tp_size: int, aside_bytes_min: int
) -> None:
    engine, pages = staged(make, tensor_parallel_size=tp_size, aside_bytes_min=aside_bytes_min)
    request = engine.generate(1, LONG, 3)
    assert request.matched_tokens == LOADED
    assert engine.output(request) == expected(engine, LONG, 3)
    engine.heard.wait_for("loaded", "long")
    for page in pages[: LOADED // engine.block_tokens]:
        assert (engine.page(page) == 0xEE).all(), "it went through the pool"
    engine.unstage("long", pages)


@pytest.mark.parametrize("aside_bytes_min", [0, 1])
def test_a_slot_that_is_given_away_before_its_copy_is_over_ends_the_engine(
    make: Make, aside_bytes_min: int
) -> None:
    """The worker lost its lease and did not hear of it: what is in the engine's pages nobody
    knows, and its own prefix cache would hand it on."""
    engine, _ = staged(make, aside_bytes_min=aside_bytes_min)
    node, slot = engine.in_slots("long")[5]
    node.overwrite(slot)
    request = engine.submit(1, LONG, 3)
    for _ in range(3):
        engine.executor.step()
    engine.heard.wait_until(
        lambda: any(said[0] == "broken" and "given away" in said[1] for said in engine.heard.all)
    )
    assert ("loaded", "long") not in engine.heard.all
    if aside_bytes_min:
        assert engine.output(request) == [], "it was computed"


@pytest.mark.parametrize("has_next", [False, True])
def test_a_node_that_dies_before_the_copy_leaves_its_memory_to_it(
    make: Make, gate: threading.Event, has_next: bool
) -> None:
    engine, pages = staged(make, aside_bytes_min=1)
    request = engine.submit(1, LONG, 3)
    engine.executor.step()  # ordered, and not copied
    if has_next:
        engine.start_node()
    else:
        engine.nodes[-1].die()
    assert ("loaded", "long") not in engine.heard.all
    gate.set()
    engine.executor.run_until_idle()
    assert engine.output(request) == expected(engine, LONG, 3)
    engine.unstage("long", pages)
    assert len(engine.nodes) == has_next


def test_leases_end_behind_the_copy_of_a_request_that_is_cancelled_before_it(
    make: Make, gate: threading.Event
) -> None:
    engine, pages = staged(make, aside_bytes_min=1)
    request = engine.submit(1, LONG, 3)
    engine.executor.step()
    engine.executor.abort(request)
    unstaged = engine.host.unstage("long", WAIT_S)
    engine.executor.step()
    assert not unstaged.done(), "the copy is still to come"
    gate.set()
    unstaged.result(WAIT_S)
    engine.end_leases("long")  # all slots are filled anew
    engine.executor.run_until_idle()
    engine.unstage("long", pages)
    assert not [said for said in engine.heard.all if said[0] == "broken"]


def test_a_segment_that_cannot_be_mapped_is_told_and_nothing_else_stops(
    make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tensor_parallel_size=2)
    with pytest.raises(ChannelError, match="cannot open segment"):
        engine.host.attach(1, str(tmp_path / "none"), 4096, WAIT_S).result(WAIT_S)
    dead = Segment.create(str(tmp_path / "dead"), 4096)
    with pytest.raises(ChannelError, match="4096 bytes, its node announced 8192"):
        engine.host.attach(2, dead.path, 8192, WAIT_S).result(WAIT_S)

    def refuses(self: HostCopier, region: int, memory: Any) -> None:
        raise OSError("no memory to lock")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopier, "add", refuses)
        with pytest.raises(ChannelError, match="no memory to lock"):
            engine.host.attach(3, dead.path, 4096, WAIT_S).result(WAIT_S)
    engine.host.detach(3)  # nobody has it
    dead.close()
    with pytest.raises(ChannelError, match="cannot open segment"):
        engine.host.attach(4, dead.path, 4096, WAIT_S).result(WAIT_S)
    assert engine.output(engine.generate(1, LONG, 3)) == expected(engine, LONG, 3)


def test_a_slot_that_is_not_its_worker_s_any_more_is_left_alone(make: Make) -> None:
    """Its lease ran out while the prompt was computed, and somebody else has it."""
    engine = make(enable_chunked_prefill=True, max_num_tokens=64)
    engine.start_node()
    pages = engine.stage("long", LONG, in_slots=True)
    node, slot = engine.filling["long"][6]
    node.overwrite(slot)
    assert engine.output(engine.generate(1, LONG, 2)) == expected(engine, LONG, 2)
    engine.host.unstage("long", WAIT_S).result(WAIT_S)
    assert (node.payload(slot) == 0xDD).all()
    saved = [said[2] for said in engine.heard.all if said[:2] == ("saved", "long")]
    assert saved == [64], "of what stands behind it nothing is known"
    engine.unstage("long", pages)


def test_a_block_may_be_completed_while_the_next_part_of_its_save_is_copied(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker hears `Saved` of each part and commits its blocks, so their headers change."""
    monkeypatch.setattr(rank_copies, "PART_BYTES_MAX", 1)
    engine = make()
    engine.start_node()
    pages = engine.stage("long", LONG, in_slots=True)
    save = HostCopier.save
    saves: list[int] = []

    per_block = engine.block_tokens // engine.shape.tokens_per_block

    def completes_the_first(self: HostCopier, runs: Any, after: Any) -> None:
        if len(saves) == per_block:  # of the first block, all of it
            node, slot = engine.filling["long"][0]
            node._head(slot)
        saves.append(len(runs))
        save(self, runs, after)

    monkeypatch.setattr(HostCopier, "save", completes_the_first)
    assert engine.output(engine.generate(1, LONG, 2)) == expected(engine, LONG, 2)
    engine.heard.wait_until(lambda: ("saved", "long", LOADED) in engine.heard.all)
    engine.unstage("long", pages)


def test_a_segment_that_is_let_go_while_a_rank_still_maps_it_is_not_kept(
    make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank had refused it already, and its node died: nobody would ever let it go again."""
    engine = make()
    segment = Segment.create(str(tmp_path / "segment"), 4096)
    begun, go_on, add, kept = threading.Event(), threading.Event(), HostCopier.add, []

    def slow(self: HostCopier, region: int, memory: Any) -> None:
        kept.append(self)
        begun.set()
        assert go_on.wait(WAIT_S)
        add(self, region, memory)

    monkeypatch.setattr(HostCopier, "add", slow)
    attached = engine.host.attach(1, segment.path, 4096, WAIT_S)
    assert begun.wait(WAIT_S)
    engine.host.detach(1)
    assert engine.output(engine.generate(1, LONG, 3)) == expected(engine, LONG, 3)
    go_on.set()
    with contextlib.suppress(ChannelError):
        attached.result(WAIT_S)
    segment.close()
    for _ in range(100):
        if 1 not in kept[0].memory:
            break
        threading.Event().wait(0.02)
    assert 1 not in kept[0].memory
