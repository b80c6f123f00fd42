"""What makes each metric move, and the page on which it is seen.

A cause is a context manager: it makes something happen and, left, lets it end. Each names the
metrics that it moves; together they must be the whole table (test_metrics.py).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from backends.metrics.table import METRICS
from tests.e2e.server import Answer, Server, take, wait_until
from tests.e2e.server_processes import process_of, processes_of, stub_of

B = 64  # block_tokens
OVERLOADED = tuple(f"rejected kind={kind}" for kind in ("fair_share", "ttft_slo", "tbt_slo"))
Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # (name, labels) -> value


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
        if (
            value > before.get((name, labels), 0.0)
            if METRICS[name].kind != "gauge"
            else value != before.get((name, labels), 0.0)
        )
    }


def total(server: Server, name: str, **labels: str) -> float:
    wanted = labels.items()
    return sum(v for (n, found), v in page(server).items() if n == name and wanted <= set(found))


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

    def admitted() -> Answer | None:
        """On a busy machine a few long prompts can be an overload, which the conductor rejects."""
        answer = server.ask(
            input_ids=ids, max_tokens=tokens, end_id=-1, return_decision=True, parameters=pins
        )
        return None if answer.error.startswith(OVERLOADED) else answer

    answer = wait_until(admitted, "the prompt to be admitted", 120.0)
    assert not answer.error, answer.error
    return answer


@cause(
    "requests_total",
    "routed_total",
    "ttft_seconds",
    "tbt_seconds",
    "token_intervals_total",
    "token_interval_seconds_total",
    "request_duration_seconds",
    "ttft_prediction_error_ratio",
    "tbt_prediction_error_ratio",
    "prefill_queue_seconds",
    "prefill_compute_seconds",
    "handover_put_seconds",
    "decode_queue_seconds",
    "handover_load_seconds",
    "prompt_tokens_total",
    "output_tokens_total",
    "steps_total",
    "step_seconds_total",
    "kv_occupation_byte_seconds_total",
    "transfers_total",
    "transfer_bytes_total",
    "transfer_seconds_total",
    "requests_within_slo_total",
    "ttft_prediction_seconds_total",
    "tbt_prediction_seconds_total",
    "store_lookup_blocks_total",
)
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
            input_ids=prompt(30 + number, 7900),
            max_tokens=4,
            end_id=-1,
            stream=True,
            parameters={"prefill_worker": "prefill_0"},
        )
        for number in range(3)
    ]
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


@cause("replicated_blocks_total", "hot_blocks", "hot_block_copies")
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


@cause("store_evictions_total", "store_bytes_used", "store_blocks", is_rough=True)
def more_blocks_than_a_node_has_room_for(server: Server) -> Iterator[None]:
    for number in range(4):
        ask(server, prompt(20 + number, 24 * B + 1))
    yield


@cause("worker_info", "pages_max", "kv_bytes_max", "workers_live", is_rough=True)
def a_worker_that_is_added(server: Server) -> Iterator[None]:
    folder = server.repository / "decode_2"
    shutil.copytree(server.repository / "decode_1", folder)
    yield
    shutil.rmtree(folder)
    # It drains first, and may be given a request until the conductor has heard of that.
    wait_until(lambda: not processes_of(server, "/decode_2/1/model.py"), "decode_2 to end", 60.0)


@cause("retries_total", "start_time_seconds", is_rough=True)
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
        wait_until(
            lambda w=worker: ask_quietly(server, prompt(5, 5 * B), w),
            f"prefill_{worker} and decode_{worker} to serve",
            60.0,
        )


def ask_quietly(server: Server, ids: list[int], worker: int) -> bool:
    with contextlib.suppress(AssertionError):
        return bool(ask(server, ids, prefill=worker, decode=worker).output_ids)
    return False


@cause("slo_seconds", is_rough=True)
def another_service_level(server: Server) -> Iterator[None]:
    server.edit("conductor", "ttft_slo_s", "28")
    yield
