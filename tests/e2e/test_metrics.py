"""Every metric of the table moves when its cause happens, and only means what it says.

A cause is a context manager: it makes something happen and, left, lets it end. Each names the
metrics that it moves; together they must be the whole table.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from backends.metric_table import METRICS
from tests.e2e.server import Answer, Server, running, take, wait_until

B = 64  # block_tokens
# They move with that engine only: test_trtllm.py.
OF_TENSORRT_LLM = {name for name in METRICS if name.startswith("nv_trt_llm_")} | {
    "mooncake_handover_tokens_total"
}
Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # (name, labels) -> value


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    """Two requests at once, room for 64 blocks a node, no second request in a decode worker, and
    whatever else its tests do to it."""
    folder = tmp_path_factory.mktemp("rough")
    parameters = {"requests_max": "2", "admission": "baseline", "tbt_slo_s": "0.0001"}
    yield from running(folder, state_dir, parameters, ("--store-bytes", "8M"))


def families(server: Server) -> list[Family]:
    pages = server.metrics_pages()
    return [family for text in pages for family in text_string_to_metric_families(text)]


def page(server: Server) -> Page:
    """Our series as the table names them; of a histogram its count."""
    found: Page = {}
    for family in families(server):
        for sample in family.samples:
            name = sample.name
            if family.type == "histogram":
                name = name.removesuffix("_count")
            if name in METRICS:
                found[name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def moved(before: Page, after: Page) -> set[str]:
    """Names of which a series changed; counts only count when they grew."""
    return {
        name
        for (name, labels), value in after.items()
        if (value > before.get((name, labels), 0.0) if METRICS[name].kind != "gauge"
            else value != before.get((name, labels), 0.0))
    }  # fmt: skip


@dataclass(frozen=True)
class Cause:
    act: Callable[[Server], AbstractContextManager[None]]
    names: frozenset[str]
    is_rough: bool  # harms the server, or needs its small limits


CAUSES: dict[str, Cause] = {}


def cause(
    *names: str, is_rough: bool = False
) -> Callable[[Callable[[Server], Iterator[None]]], None]:
    def declare(act: Callable[[Server], Iterator[None]]) -> None:
        made = contextlib.contextmanager(act)
        CAUSES[act.__name__] = Cause(
            made, frozenset(f"mooncake_{name}" for name in names), is_rough
        )

    return declare


def prompt(number: int, tokens: int) -> list[int]:
    """Always the same tokens for a number; shares no block with another number."""
    return [20 + (number * 7919 + index * index * (number + 3)) % 2000 for index in range(tokens)]


def ask(
    server: Server, ids: list[int], prefill: int = 0, decode: int = 0, tokens: int = 4
) -> Answer:
    pins = {"prefill_worker": f"prefill_{prefill}", "decode_worker": f"decode_{decode}"}
    answer = server.ask(
        input_ids=ids, max_tokens=tokens, end_id=-1, return_decision=True, parameters=pins
    )
    assert not answer.error, answer.error
    return answer


def stub_of(server: Server, model: str) -> psutil.Process:
    return process_of(server, f"/{model}/1/model.py")


def process_of(server: Server, mark: str) -> psutil.Process:
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and mark in " ".join(process.cmdline()):
                return process
    raise AssertionError(f"no process has {mark}")


@cause(
    "requests_total", "routed_total", "ttft_seconds", "tbt_seconds", "token_intervals_total",
    "token_interval_seconds_total", "request_duration_seconds", "ttft_prediction_error_ratio",
    "tbt_prediction_error_ratio", "prefill_queue_seconds", "prefill_compute_seconds",
    "handover_put_seconds", "decode_queue_seconds", "handover_load_seconds",
    "prompt_tokens_total", "output_tokens_total", "steps_total", "step_seconds_total",
    "kv_occupation_byte_seconds_total", "transfers_total", "transfer_bytes_total",
    "transfer_seconds_total", "store_bytes_used", "store_blocks",
)  # fmt: skip
def a_streamed_answer(server: Server) -> Iterator[None]:
    ask(server, prompt(1, 3 * B + 5), tokens=20)
    yield


@cause("self_checks_total")
def time_passes(server: Server) -> Iterator[None]:
    yield  # the servers of these tests run with --self-check


@cause("requests_live", "requests_running", "context_tokens", "pages_used", "kv_bytes_used")
def a_stream_that_goes_on(server: Server) -> Iterator[None]:
    stream = server.stream(text_input="It was", max_tokens=4000, end_id=-1, stream=True)
    assert stream.next() is not None
    yield
    stream.leave()


@cause("requests_waiting", "queue_tokens", "leases_held", "store_leases", "step_age_seconds")
def more_prompts_than_a_prefill_worker_has_pages_for(server: Server) -> Iterator[None]:
    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(ask, server, prompt(10 + n, 7900), 1, 1) for n in range(4)]
        yield
        for future in pending:
            future.result()


@cause("aborted_prefill_tokens_total")
def clients_that_leave_while_their_prompts_are_computed(server: Server) -> Iterator[None]:
    def steps() -> float:
        return total(server, "mooncake_steps_total", model="prefill_0")

    before = steps()
    streams = [
        server.stream(
            input_ids=prompt(30 + number, 7900), max_tokens=4, end_id=-1, stream=True,
            parameters={"prefill_worker": "prefill_0"},
        )
        for number in range(3)
    ]  # fmt: skip
    wait_until(lambda: steps() > before, "a chunk to be computed")
    for stream in streams:
        stream.leave()
    yield


@cause("fetches_total", "prefix_load_seconds")
def a_prompt_whose_prefix_is_on_the_other_node(server: Server) -> Iterator[None]:
    ids = prompt(2, 16 * B + 5)
    ask(server, ids, prefill=0)
    assert ask(server, ids, prefill=1).decision["fetched_blocks"] > 0
    yield


@cause("replicated_blocks_total")
def a_prefix_that_is_asked_for_again_and_again(server: Server) -> Iterator[None]:
    ids = prompt(3, 4 * B + 5)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ask(server, ids, tokens=1), range(160)))
    yield


@cause("rejections_total", is_rough=True)
def more_requests_than_the_front_takes(server: Server) -> Iterator[None]:
    streams = [
        server.stream(text_input="It was", max_tokens=4000, end_id=-1, stream=True)
        for _ in range(2)
    ]
    for stream in streams:
        assert stream.next() is not None
    assert "rejected kind=front_full" in server.ask(text_input="It was", max_tokens=2).error
    yield
    for stream in streams:
        stream.leave()


@cause("wasted_prefills_total", "wasted_prefill_seconds_total", is_rough=True)
def a_request_that_its_decode_worker_refuses_when_it_comes(server: Server) -> Iterator[None]:
    pin = {"decode_worker": "decode_0"}
    stream = server.stream(
        text_input="It was", max_tokens=4000, end_id=-1, stream=True, parameters=pin
    )
    assert stream.next() is not None and stream.next() is not None, "it decodes"
    refused = server.ask(text_input="Is it", max_tokens=8, parameters=pin).error
    assert re.search(r"rejected kind=decode_overload retry_after_s=[0-9.]+: ", refused), refused
    yield
    stream.leave()


@cause("store_evictions_total", is_rough=True)
def more_blocks_than_a_node_has_room_for(server: Server) -> Iterator[None]:
    for number in range(4):
        ask(server, prompt(20 + number, 24 * B + 1))
    yield


@cause("worker_info", "pages_max", "kv_bytes_max", is_rough=True)
def a_worker_that_is_added(server: Server) -> Iterator[None]:
    folder = server.repository / "decode_2"
    shutil.copytree(server.repository / "decode_1", folder)
    yield
    shutil.rmtree(folder)
    wait_until(lambda: not server.ready("decode_2"), "decode_2 to be gone")


@cause("retries_total", "workers_live", "start_time_seconds", is_rough=True)
def a_worker_that_is_killed_while_it_decodes(server: Server) -> Iterator[None]:
    stream = server.stream(
        text_input="It was", max_tokens=1500, end_id=-1, stream=True, return_decision=True
    )
    answer = Answer()
    while "decode" not in answer.decision:
        take(answer, stream.next())
    stub_of(server, answer.decision["decode"]).kill()
    yield
    assert not (rest := stream.all()).error, rest.error
    wait_until_all_serve(server)


@cause("transfer_failures_total", "store_bytes_max", is_rough=True)
def a_storage_node_that_is_killed(server: Server) -> Iterator[None]:
    ids = prompt(4, 16 * B + 5)
    ask(server, ids, prefill=1, decode=1)
    server.process.send_signal(signal.SIGSTOP)  # the launcher, which would start it again at once
    try:
        process_of(server, "--node-id s1").kill()
        assert len(ask(server, ids, prefill=0).output_ids) == 4, "computed instead"
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)
    wait_until_all_serve(server)


def wait_until_all_serve(server: Server) -> None:
    for worker in (0, 1):
        wait_until(lambda w=worker: ask_quietly(server, prompt(5, 5 * B), w),
                   f"prefill_{worker} and decode_{worker} to serve", 60.0)  # fmt: skip


def ask_quietly(server: Server, ids: list[int], worker: int) -> bool:
    with contextlib.suppress(AssertionError):
        return bool(ask(server, ids, prefill=worker, decode=worker).output_ids)
    return False


@pytest.mark.parametrize("name", CAUSES)
def test_every_cause_moves_its_metrics(name: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue("rough" if CAUSES[name].is_rough else "demo")
    wait_until(server.is_idle, "an idle start")
    before, seen = page(server), set()

    def is_all_seen() -> bool:
        seen.update(moved(before, page(server)))
        return CAUSES[name].names <= seen

    with CAUSES[name].act(server):
        try:
            wait_until(is_all_seen, "metrics to move", 20.0)
        except AssertionError:
            pytest.fail(f"these did not move: {sorted(CAUSES[name].names - seen)}")
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_every_metric_of_the_table_has_a_cause() -> None:
    caused = frozenset().union(*(cause.names for cause in CAUSES.values()))
    assert caused == METRICS.keys() - OF_TENSORRT_LLM


def total(server: Server, name: str, **labels: str) -> float:
    wanted = labels.items()
    return sum(v for (n, found), v in page(server).items() if n == name and wanted <= set(found))


def test_the_numbers_of_known_requests_are_exact(demo: Server) -> None:
    names = ("mooncake_requests_total", "mooncake_ttft_seconds", "mooncake_tbt_seconds",
             "mooncake_request_duration_seconds", "mooncake_token_intervals_total",
             "mooncake_prompt_tokens_total", "mooncake_output_tokens_total",
             "mooncake_prefix_load_seconds", "mooncake_prefill_compute_seconds",
             "mooncake_decode_queue_seconds")  # fmt: skip
    wait_until(demo.is_idle, "an idle start")
    before = {name: total(demo, name) for name in names}
    cached = {path: total(demo, "mooncake_prompt_tokens_total", path=path)
              for path in ("computed", "local", "fetched")}  # fmt: skip
    ids = prompt(6, 6 * B + 3)
    ask(demo, ids, prefill=0, tokens=10)
    ask(demo, ids, prefill=0, tokens=10)
    ask(demo, ids, prefill=1, tokens=1)
    expected = {
        "mooncake_requests_total": 3, "mooncake_ttft_seconds": 3, "mooncake_tbt_seconds": 2,
        "mooncake_request_duration_seconds": 3, "mooncake_token_intervals_total": 18,
        "mooncake_prompt_tokens_total": 3 * len(ids), "mooncake_output_tokens_total": 21,
        "mooncake_prefix_load_seconds": 2, "mooncake_prefill_compute_seconds": 3,
        "mooncake_decode_queue_seconds": 2,
    }  # fmt: skip
    counted: dict[str, float] = {}

    def is_published() -> bool:
        counted.update({name: total(demo, name) - before[name] for name in names})
        return counted == expected

    with contextlib.suppress(AssertionError):
        wait_until(is_published, "the numbers to be published", 10.0)
    assert counted == expected
    paths = {path: total(demo, "mooncake_prompt_tokens_total", path=path) - count
             for path, count in cached.items()}  # fmt: skip
    assert paths == {"computed": len(ids) + 3 + 3, "local": 6 * B, "fetched": 6 * B}


def test_the_page_is_what_prometheus_reads(demo: Server) -> None:
    ours = [family for family in families(demo) if family.name.startswith("mooncake_")]
    declared = {
        name.removesuffix("_total"): metric for name, metric in METRICS.items()
        if not name.startswith("nv_trt_llm_")
    }  # fmt: skip
    assert {family.name for family in ours} == declared.keys()
    for family in ours:
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
        fell = {key: (value, after.get(key)) for key, value in before.items()
                if METRICS[key[0]].kind != "gauge" and after.get(key, -1.0) < value}  # fmt: skip
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
    wait_until(lambda: not rough.ready("decode_1"), "decode_1 to be gone")

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
        lambda: (now := page(server)) and "mooncake_output_tokens_total" in moved(before, now)
        and now, "new tokens to be counted",
    )  # fmt: skip
