"""Every metric of the table moves when its cause happens, and only means what it says."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.metrics.table import GATEWAY, METRICS
from tests.e2e.causes import (
    CAUSES,
    B,
    Family,
    Page,
    ask,
    families,
    moved,
    page,
    prompt,
    total,
    wait_until_all_serve,
)
from tests.e2e.server import Server, running, wait_until
from tests.e2e.server_processes import stub_of

# They move with these engines only: test_trtllm.py, tests/vllm.
OWN_OF_ENGINES = ("nv_trt_llm_", "vllm:")
OF_CONNECTED = {name for name in METRICS if name.startswith(OWN_OF_ENGINES)} | {
    "mooncake_handover_tokens_total"
}
# One machine has one frontend, and no network card: test_routing_notes.py, test_nic_failover.py.
OF_NETWORK_CARDS = {
    name for name, metric in METRICS.items() if "nic" in {label.name for label in metric.labels}
}
UNREACHED = "mooncake_worker_unreached"  # shown of workers to which there is no way, and else not
OF_A_FLEET = OF_NETWORK_CARDS | {
    "mooncake_nixl_agents_given_up_total",
    "mooncake_frontends_known",
    "mooncake_routed_elsewhere",
    "mooncake_routing_note_batches_total",
    UNREACHED,
    "mooncake_recorded_requests_total",  # only where a recording is asked for: test_recording.py
    "mooncake_trace_spans_total",  # only where traces are: test_traces.py
}
# test_ssd_tier.py, test_damage.py.
OF_AN_SSD = {"mooncake_store_spills_total", "mooncake_store_restored_blocks_total"}
OF_DAMAGE = {"mooncake_store_bad_copies_total"}
# Pages are short and priorities differ: tests/backends/workers/test_preemption.py.
OF_A_SHORTAGE = {"mooncake_decode_preemptions_total"}
# Only with --openai-port: test_dashboards.py.
OF_A_GATEWAY = {name for name, metric in METRICS.items() if GATEWAY in metric.publishers}
# Shown only where role_flips is not off: test_roles.py.
OF_ROLE_FLIPS = {"mooncake_workers_wanted", "mooncake_role_flips_proposed_total"}

# Shown only where API keys are configured: test_tenants.py.
OF_TENANTS = {name for name in METRICS if name.startswith("mooncake_tenant_")}


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    """Two requests at once, room for 64 blocks a node, no second request in a decode worker, and
    whatever else its tests do to it."""
    folder = tmp_path_factory.mktemp("rough")
    parameters = {"requests_max": "2", "admission": "baseline", "tbt_slo_s": "0.0001"}
    yield from running(folder, state_dir, parameters, ("--store-bytes", "8M"))


# The causes that need a limited server of their own take two minutes of computing.
PARAMS = [
    pytest.param(name, marks=pytest.mark.long if made.is_rough else ())
    for name, made in CAUSES.items()
]


@pytest.mark.parametrize("name", PARAMS)
def test_every_cause_moves_its_metrics(name: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue("rough" if CAUSES[name].is_rough else "demo")
    wait_until(server.is_idle, "an idle start")
    before, seen = page(server), set()

    def is_all_seen() -> bool:
        seen.update(moved(before, page(server)))
        return CAUSES[name].names <= seen

    with CAUSES[name].act(server):
        try:
            wait_until(is_all_seen, "metrics to move", 90.0)
        except AssertionError:
            pytest.fail(f"these did not move: {sorted(CAUSES[name].names - seen)}")
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_every_metric_of_the_table_has_a_cause() -> None:
    caused = frozenset().union(*(cause.names for cause in CAUSES.values()))
    assert caused == METRICS.keys() - (
        OF_CONNECTED
        | OF_A_FLEET
        | OF_ROLE_FLIPS
        | OF_AN_SSD
        | OF_DAMAGE
        | OF_A_SHORTAGE
        | OF_A_GATEWAY
        | OF_TENANTS
    )


def test_the_numbers_of_known_requests_are_exact(demo: Server) -> None:
    names = (
        "mooncake_requests_total",
        "mooncake_ttft_seconds",
        "mooncake_tbt_seconds",
        "mooncake_request_duration_seconds",
        "mooncake_token_intervals_total",
        "mooncake_prompt_tokens_total",
        "mooncake_output_tokens_total",
        "mooncake_prefix_load_seconds",
        "mooncake_prefill_compute_seconds",
        "mooncake_decode_queue_seconds",
    )
    wait_until(demo.is_idle, "an idle start")
    before = {name: total(demo, name) for name in names}
    cached = {
        path: total(demo, "mooncake_prompt_tokens_total", path=path)
        for path in ("computed", "local", "fetched")
    }
    ids = prompt(6, 6 * B + 3)
    ask(demo, ids, prefill=0, tokens=10)
    ask(demo, ids, prefill=0, tokens=10)
    ask(demo, ids, prefill=1, tokens=1)
    expected = {
        "mooncake_requests_total": 3,
        "mooncake_ttft_seconds": 3,
        "mooncake_tbt_seconds": 2,
        "mooncake_request_duration_seconds": 3,
        "mooncake_token_intervals_total": 18,
        "mooncake_prompt_tokens_total": 3 * len(ids),
        "mooncake_output_tokens_total": 21,
        "mooncake_prefix_load_seconds": 2,
        "mooncake_prefill_compute_seconds": 3,
        "mooncake_decode_queue_seconds": 2,
    }
    counted: dict[str, float] = {}

    def is_published() -> bool:
        counted.update({name: total(demo, name) - before[name] for name in names})
        return counted == expected

    with contextlib.suppress(AssertionError):
        wait_until(is_published, "the numbers to be published", 10.0)
    assert counted == expected
    paths = {
        path: total(demo, "mooncake_prompt_tokens_total", path=path) - count
        for path, count in cached.items()
    }
    assert paths == {"computed": len(ids) + 3 + 3, "local": 6 * B, "fetched": 6 * B}


def test_the_page_is_what_prometheus_reads(demo: Server) -> None:
    def ours() -> list[Family]:
        return [family for family in families(demo) if family.name.startswith("mooncake_")]

    declared = {
        name.removesuffix("_total"): metric
        for name, metric in METRICS.items()
        if not name.startswith(OWN_OF_ENGINES)
        and name not in OF_NETWORK_CARDS | OF_ROLE_FLIPS | OF_A_GATEWAY | OF_TENANTS | {UNREACHED}
    }
    # The page is put together of those of all Tritons, which say something once a second.
    with contextlib.suppress(AssertionError):
        wait_until(
            lambda: {family.name for family in ours()} == declared.keys(),
            "every metric of every model to be on the page",
        )
    assert {family.name for family in ours()} == declared.keys()
    for family in ours():
        metric = declared[family.name]
        assert (family.type, family.documentation) == (metric.kind, metric.meaning)
        for sample in family.samples:
            assert math.isfinite(sample.value), sample
            labels = set(sample.labels) - {"model", "le"}
            assert labels == {label.name for label in metric.labels}, sample
        if metric.kind == "histogram":
            bounds = {float(s.labels["le"]) for s in family.samples if "le" in s.labels}
            assert bounds == {*metric.buckets, math.inf}


def test_nothing_is_in_use_when_nothing_is_going_on(demo: Server) -> None:
    in_use = {name for name, metric in METRICS.items() if metric.is_use}

    def used() -> dict[str, float]:
        return {name: value for (name, _), value in page(demo).items() if name in in_use and value}

    wait_until(lambda: not used(), f"the gauges of use to be 0, not {used()}", 15.0)


def test_no_counter_falls_when_models_are_edited_killed_and_removed(rough: Server) -> None:
    def ask_all() -> None:
        for worker in (0, 1):
            ask(rough, prompt(30 + worker, B), worker, worker)

    def loads(model: str) -> int:
        return rough.triton_log().count(f"successfully loaded '{model}'")

    def assert_no_counter_fell(before: Page) -> Page:
        after = page(rough)
        fell = {
            key: (value, after.get(key))
            for key, value in before.items()
            if METRICS[key[0]].kind != "gauge" and after.get(key, -1.0) < value
        }
        assert not fell, fell
        return after

    ask_all()
    seen = page(rough)
    done = {model: loads(model) for model in ("prefill_0", "decode_1", "conductor")}
    rough.edit("prefill_0", "chunk_tokens", "256")
    rough.edit("conductor", "ttft_slo_s", "29")
    stub_of(rough, "decode_1").kill()
    for model, count in done.items():
        wait_until(lambda m=model, n=count: loads(m) > n, f"{model} to be loaded again", 60.0)
    wait_until_all_serve(rough)
    seen = assert_no_counter_fell(seen)
    ask_all()
    assert moved(seen, wait_moved(rough, seen)) >= {"mooncake_output_tokens_total"}

    shutil.rmtree(rough.repository / "decode_1")
    wait_until(lambda: rough.is_gone("decode_1"), "decode_1 to be gone")

    def gauges_left() -> dict[str, float]:
        return {
            name: value
            for (name, labels), value in page(rough).items()
            if ("model", "decode_1") in labels and METRICS[name].kind == "gauge" and value
        }

    wait_until(lambda: not gauges_left(), "the gauges of a model that is gone to be 0")
    assert_no_counter_fell(seen)


def wait_moved(server: Server, before: Page) -> Page:
    return wait_until(
        lambda: (
            (now := page(server)) and "mooncake_output_tokens_total" in moved(before, now) and now
        ),
        "new tokens to be counted",
    )
