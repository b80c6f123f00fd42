"""A prompt that leaves early: what was computed of it is counted, so that waste can be told.

And the slots that it did not fill are free at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.errors import Cancelled, Overloaded
from backends.metrics.page import MetricPage
from mooncake_store.records.status import HolderStats
from tests.backends.metrics.test_page import Triton
from tests.backends.stepped_site import Site
from tests.backends.workers.pair import NODE, Pair, pairs, prompt

CHUNK_TOKENS = 8  # of the site's prefill worker


def aborted_tokens(site: Site) -> float:
    triton = Triton()
    MetricPage("prefill", triton).take(site.prefill.process.observations)
    return triton["mooncake_aborted_prefill_tokens_total"]


def test_a_prompt_that_is_stopped_after_its_first_chunk_wasted_that_chunk(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(seed, monkeypatch)
    client = site.ask(list(range(20)), 4)
    while not site.prefill.jobs[client.request_id].computed_tokens:
        site.turn(site.prefill)
        if todo := site.things_to_do():
            todo[0]()
    site.prefill.stop(client.request_id)
    site.settle()
    assert client.error is not None
    assert aborted_tokens(site) == CHUNK_TOKENS


def test_a_prompt_that_is_answered_wasted_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(seed, monkeypatch)
    client = site.ask(list(range(20)), 4)
    site.settle()
    assert client.error is None
    assert aborted_tokens(site) == 0


@pytest.fixture(params=["layer by layer", "chunk by chunk"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    is_layerwise = str(request.param == "layer by layer").lower()
    yield from pairs(tmp_path, monkeypatch, layerwise=is_layerwise)


def node_of(pair: Pair) -> HolderStats:
    (node,) = pair.directory.stats().nodes
    assert node.node_id == NODE
    return node


def test_slots_of_a_prompt_that_is_stopped_do_not_rest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, copy_layer = pair.prefill.writer, pair.prefill.writer._copy_layer
    begun: list[int] = []

    def copy_then_stop(put: Any, *of_layer: Any) -> None:
        copy_layer(put, *of_layer)
        begun.append(node_of(pair).writing_blocks)
        for worker in (pair.prefill, pair.decode):
            worker.stop(put.request_id)

    monkeypatch.setattr(writer, "_copy_layer", copy_then_stop)
    asked = pair.ask(prompt(3, 600))
    assert isinstance(asked.wait_failed(), Cancelled)
    pair.wait_until_idle()
    assert begun[0] > 0, "nothing was being written when it was stopped"
    node = node_of(pair)
    assert (node.writing_blocks, node.quarantined_units) == (0, 0)
    assert pair.directory.stats().leases == 0


def test_slots_of_a_prompt_that_found_too_little_room_do_not_rest(pair: Pair) -> None:
    layout = pair.prefill.process.store.layout
    keys = [number.to_bytes(16, "little") for number in range(10_000)]
    taken = pair.directory.allocate(
        NODE, keys, "somebody", 60.0, size_bytes=layout.block_bytes
    ).slots
    used = [slot for slot in taken if slot is not None]
    pair.directory.abandon(used[:3], "somebody")
    asked = pair.ask(prompt(4, 600))
    error = asked.wait_failed()
    assert isinstance(error, Overloaded) and error.kind == "store_full", error
    pair.decode.stop(asked.request_id)
    pair.wait_until_idle()
    node = node_of(pair)
    assert (node.writing_blocks, node.quarantined_units) == (len(used) - 3, 0)
