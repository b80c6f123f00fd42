"""A load that fails costs time only. vLLM computes the tokens, and the worker ends its leases."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from backends.engine.connected.block_pages import SlotUse, place_of
from backends.engine.connected.copier import HostCopier
from tests.backends.engine.connected.connected import keys_of, prompt_of
from tests.backends.engine.connected.listening import WAIT_S
from tests.vllm.inside.gates import LoadGate
from tests.vllm.inside.gates import load_gate as load_gate  # a fixture
from tests.vllm.inside.real_engine import RealVllm
from tests.vllm.inside.stored import filled

LONG = prompt_of(300)
TOKENS = 12
NOT_MAPPED = 7  # a region


def check_computed(engine: RealVllm, request: Any, local: int = 0, loaded: int = 256) -> None:
    engine.executor.run_until_idle()
    assert engine.output(request) == engine.expected(LONG, TOKENS)
    news = engine.news(request.name.partition("-")[2])
    assert news[:2] == [("claimed", local, loaded), ("loaded",)]
    assert [what[0] for what in news].count("loaded") == 1


@pytest.mark.parametrize("local", [0, 96])
def test_a_slot_that_is_given_away_while_it_is_read_makes_vllm_compute(
    engine: RealVllm, load_gate: LoadGate, local: int
) -> None:
    load_gate.is_open.set()
    store = filled(engine, LONG)
    engine.start_node()
    engine.generate(1, LONG[: local + 1], 1)
    load_gate.is_open.clear()
    pages = engine.stage("a", LONG, store, loaded_tokens=256, in_slots=True)
    request = engine.submit(1, LONG, TOKENS, name="a")
    engine.executor.step()
    node, slot = engine.in_slots("a")[2]
    node.overwrite(slot)
    load_gate.is_open.set()
    check_computed(engine, request, local, 256 - local)
    again = engine.generate(2, LONG, TOKENS)  # from vLLM's prefix cache
    assert engine.output(again) == engine.expected(LONG, TOKENS), "unknown bytes are cached"
    engine.unstage("a", pages)
    engine.check_clean()


@pytest.mark.parametrize("has_uses", [False, True])
def test_a_place_in_a_region_that_is_not_mapped_makes_vllm_compute(
    engine: RealVllm, has_uses: bool
) -> None:
    places = [place_of(NOT_MAPPED, block * engine.block_bytes) for block in range(4)]
    stage = engine.message("a", LONG, places, 256)
    if has_uses:
        use = SlotUse(0, place_of(NOT_MAPPED, 0), 64, b"head", 32)
        stage = msgspec.structs.replace(stage, uses=(use,))
    engine.host.stage(stage, WAIT_S).result(WAIT_S)
    check_computed(engine, engine.submit(1, LONG, TOKENS, name="a"))
    engine.unstage("a", [])
    engine.check_clean()


def test_an_exception_in_the_copier_makes_vllm_compute(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {key: bytes(engine.block_bytes) for key in keys_of(engine, LONG)}

    def fails(copier: HostCopier, runs: Any, after: Any) -> None:
        for pages, host in copier._pairs(runs[:3], after):
            pages[:] = host  # a part of the bytes
        raise OSError("the bus is gone")

    monkeypatch.setattr(HostCopier, "load_aside", fails)
    pages = engine.stage("a", LONG, wrong, loaded_tokens=256)
    check_computed(engine, engine.submit(1, LONG, TOKENS, name="a"))
    engine.unstage("a", pages)
    engine.check_clean()


def test_other_requests_are_loaded_beside_one_that_fails(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = prompt_of(200, seed=2)
    store = filled(engine, other)
    places = [place_of(NOT_MAPPED, block * engine.block_bytes) for block in range(4)]
    engine.host.stage(engine.message("a", LONG, places, 256), WAIT_S).result(WAIT_S)
    pages = engine.stage("b", other, store, loaded_tokens=192)
    failing = engine.submit(1, LONG, TOKENS, name="a")
    fine = engine.submit(2, other, TOKENS, name="b")
    check_computed(engine, failing)
    assert engine.output(fine) == engine.expected(other, TOKENS)
    assert engine.news("b")[0] == ("claimed", 0, 192)
    engine.unstage("a", [])
    engine.unstage("b", pages)
    engine.check_clean()


def test_a_request_that_is_aborted_before_its_load_fails_frees_its_pages(
    engine: RealVllm, load_gate: LoadGate
) -> None:
    places = [place_of(NOT_MAPPED, block * engine.block_bytes) for block in range(4)]
    engine.host.stage(engine.message("a", LONG, places, 256), WAIT_S).result(WAIT_S)
    request = engine.submit(1, LONG, TOKENS, name="a")
    engine.executor.step()
    engine.executor.abort(request)
    load_gate.is_open.set()
    engine.executor.run_until_idle()
    engine.heard.wait_for("loaded", "a")
    engine.unstage("a", [])
    engine.check_clean()


def test_a_load_that_one_of_two_ranks_could_not_do_is_reported_when_both_have_ended() -> None:
    """vLLM's own part in it, for several ranks."""
    both = KVOutputAggregator(expected_finished_count=2)

    def after(first: KVConnectorOutput, second: KVConnectorOutput) -> KVConnectorOutput:
        # Copies: vLLM has one object for all empty outputs, and writes to it.
        outputs = [
            copy.copy(ModelRunnerOutput.with_kv_conn_output_only(each)) for each in (first, second)
        ]
        found = both.aggregate(outputs)
        assert found is not None and found.kv_connector_output is not None
        return found.kv_connector_output

    failed = KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"})
    early = after(failed, KVConnectorOutput())
    assert not early.finished_recving and not early.failed_recving
    late = after(KVConnectorOutput(), KVConnectorOutput(finished_recving={"a"}))
    assert late.finished_recving == {"a"} == late.failed_recving
