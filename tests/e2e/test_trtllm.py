"""Engine tensorrt_llm on a real Triton, over the stand-in package: hits, misses, and losses.

Greedy answers are compared with what the stand-in's model must say of the whole context; a page
that was lost, stale, torn or another rank's gives other tokens.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.server import Answer, Server, wait_until
from tests.e2e.server_processes import stub_of
from tests.e2e.trtllm import expected, serving, set_parameter

B, PAGE = 64, 32
TOKENS = 40
PATHS = {"mapped": ("prefill_0", "decode_0"), "nixl": ("prefill_1", "decode_1")}  # 1: on node s1
OTHER = {"prefill_0": "prefill_1", "prefill_1": "prefill_0"}  # both on node s0


@dataclass(frozen=True, slots=True)
class Variant:
    dtype: str = "float32"
    page_tokens: int = 32
    tp_size: int = 1
    api: str = "1.3"  # the shape of the connector's API


VARIANTS = {"tp1": Variant(), "tp2 small pages": Variant("bfloat16", 16, 2, "1.2")}
# All of them are tested without a server, tests/backends/engine/trtllm/.
PARAMS = [pytest.param(name, marks=[] if name == "tp1" else pytest.mark.long) for name in VARIANTS]
handed_over_tokens: Counter[str] = Counter()  # by `ask`, to the decode workers of each server
# For what has nothing to do with ranks and sizes of pages: it takes long enough once.
only_tp1 = pytest.mark.parametrize("case", ["tp1"], indirect=True)


def prompt(number: int, tokens: int) -> list[int]:
    return [20 + (number * 7919 + index * index * (number + 1)) % 2000 for index in range(tokens)]


def ask(server: Server, ids: list[int], tokens: int = TOKENS, **parameters: str) -> Answer:
    answer = server.ask(
        input_ids=ids, max_tokens=tokens, end_id=-1, return_decision=True, parameters=parameters
    )
    assert not answer.error, answer.error
    if tokens > 1:
        handed_over_tokens[server.addresses.http] += len(ids) + 1  # the prompt and token 0
    return answer


def through(path: str) -> dict[str, str]:
    prefill, decode = PATHS[path]
    return {"prefill_worker": prefill, "decode_worker": decode, "tenant": path}


def wanted(variant: Variant, ids: list[int], tokens: int = TOKENS) -> list[int]:
    return expected(ids, tokens, variant.dtype, variant.page_tokens)


@pytest.fixture(scope="module", params=PARAMS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, state_dir: Path
) -> Iterator[tuple[Server, Variant]]:
    variant = VARIANTS[request.param]
    further = {"page_tokens": str(variant.page_tokens), "tp_size": str(variant.tp_size)}
    folder = tmp_path_factory.mktemp("trtllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_TRTLLM_API", variant.api)
        for server in serving(folder, state_dir, {"dtype": variant.dtype}, further):
            yield server, variant


@pytest.mark.parametrize("path", PATHS)
def test_misses_hits_and_partial_hits_give_the_same_tokens(
    case: tuple[Server, Variant], path: str
) -> None:
    """A worker that computed a prompt still has its pages; the other one finds it in the store."""
    server, variant = case
    page, here = variant.page_tokens, through(path)
    there = here | {"prefill_worker": OTHER[here["prefill_worker"]]}
    for length in (1, page - 1, page, B - 1, B, B + 1, 5 * B + 3, 5 * B + page + 3, 700):
        ids, rest = prompt(length, length), prompt(length + 1, 90)
        longer = ids + rest
        in_store = min(len(longer) // B * B, (len(longer) - 1) // page * page)
        for what, tokens, where, cached in (
            ("miss", ids, here, 0),
            ("hit", ids, here, (length - 1) // page * page),
            ("partial hit in the store", longer, there, length // B * B),
            ("pages, then the store", longer, here, max(length // page * page, in_store)),
        ):
            answer = ask(server, tokens, **where)
            assert answer.output_ids == wanted(variant, tokens), (length, what)
            assert answer.cached_tokens == cached, (length, what)
    decode, transport = here["decode_worker"], path
    read_bytes = server.metric(
        "mooncake_transfer_bytes_total", transport=transport, direction="read", model=decode
    )
    assert read_bytes > 0, f"{decode} has read nothing by {transport}"
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_decode_computes_only_the_end_of_the_last_page(case: tuple[Server, Variant]) -> None:
    server, variant = case
    page = variant.page_tokens

    def tokens(path: str) -> float:
        return server.metric("mooncake_handover_tokens_total", path=path)

    def all_are_counted() -> bool:  # a worker tells its metrics only once a second
        counted = sum(tokens(path) for path in ("loaded", "local", "computed"))
        return counted == handed_over_tokens[server.addresses.http]

    wait_until(all_are_counted, "earlier requests on the metrics page")
    before = {path: tokens(path) for path in ("loaded", "local", "computed")}
    ids = prompt(77, 6 * B + page + 5)
    ask(server, ids, tenant="counted")
    wait_until(all_are_counted, "this one on the metrics page")
    assert tokens("loaded") - before["loaded"] == 6 * B + page
    assert tokens("computed") - before["computed"] == 5 + 1, "and the first token"
    assert tokens("local") == before["local"]


def test_the_next_turn_finds_what_decode_has_generated(case: tuple[Server, Variant]) -> None:
    """Who asks before decode's blocks are in the store finds less, and from then on prefill's own
    pages; so each try is a conversation of its own."""
    server, variant = case
    numbers = itertools.count(5)

    def found() -> list[int]:
        ids = prompt(next(numbers), 100)
        first = ask(
            server,
            ids,
            3 * B,
            tenant="turns",
            **dict(zip(("prefill_worker", "decode_worker"), PATHS["mapped"], strict=True)),
        )
        wait_until(server.is_idle, "the end of decode's work")
        conversation = ids + first.output_ids + [7, 8, 9]
        blocks = (len(ids) + len(first.output_ids) - 1) // B  # the last token's KV is nobody's
        again = ask(server, conversation, 1, tenant="turns", prefill_worker="prefill_0")
        return conversation if again.cached_tokens == blocks * B else []

    conversation = wait_until(found, "generated blocks in the store")
    answer = ask(server, conversation, tenant="turns")
    want = wanted(variant, conversation)
    assert answer.output_ids == want


def test_tenants_do_not_share_a_page_of_the_engine_either(case: tuple[Server, Variant]) -> None:
    server, _ = case
    ids = prompt(6, 3 * B + 1)
    for tenant in ("ann", "bob"):
        assert ask(server, ids, 2, tenant=tenant).cached_tokens == 0
    assert ask(server, ids, 2, tenant="bob").cached_tokens == 3 * B


def test_sixteen_at_once_give_the_same_tokens(case: tuple[Server, Variant]) -> None:
    server, variant = case
    prompts = [prompt(number % 5, 50 + 37 * (number % 5)) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda ids: ask(server, ids, tenant="many"), prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        want = wanted(variant, ids)
        assert answer.output_ids == want
    wait_until(server.is_idle, "pages, slots and leases to be free")


@only_tp1
def test_a_client_that_leaves_frees_everything(case: tuple[Server, Variant]) -> None:
    server, variant = case
    wait_until(server.is_idle, "an idle start")
    stream = server.stream(input_ids=prompt(8, 200), max_tokens=7000, end_id=-1, stream=True)
    for _ in range(3):
        assert stream.next() is not None
    wait_until(lambda: server.metric("mooncake_pages_used"), "decode to be at work")
    stream.leave()
    wait_until(server.is_idle, "pages, slots and leases to be free", deadline_s=10.0)
    long = server.stream(input_ids=prompt(9, 7900), max_tokens=100, end_id=-1, stream=True)
    long.leave()
    wait_until(server.is_idle, "pages, slots and leases to be free", deadline_s=10.0)
    ids = prompt(10, 150)
    want = wanted(variant, ids)
    assert ask(server, ids).output_ids == want


@only_tp1
def test_clients_that_leave_at_any_moment_leave_no_page_and_no_lease(
    case: tuple[Server, Variant], seed: int
) -> None:
    """Before staging, while it is staged, computed, saved, handed over, decoded."""
    server, variant = case
    chance = random.Random(seed)
    wait_until(server.is_idle, "an idle start")
    for _ in range(60):
        ids = [chance.randrange(20, 2000) for _ in range(chance.randrange(100, 900))]
        stream = server.stream(input_ids=ids, max_tokens=200, end_id=-1, stream=True)
        until_s = time.monotonic() + chance.random() * 0.08
        wait_until(lambda until_s=until_s: time.monotonic() > until_s, "the client to leave")
        stream.leave()
    wait_until(server.is_idle, "pages, slots and leases to be free")
    wait_until(lambda: server.metric("mooncake_store_leases") == 0, "no lease in the store", 15.0)
    ids = prompt(12, 150)
    assert ask(server, ids).output_ids == wanted(variant, ids)


@only_tp1
def test_stop_words_and_end_ids_end_an_answer_early(case: tuple[Server, Variant]) -> None:
    server, variant = case
    ids = prompt(13, 130)
    want = wanted(variant, ids)
    end = server.ask(input_ids=ids, max_tokens=TOKENS, end_id=want[7])
    assert (end.output_ids, end.finish_reason) == (want[: want.index(want[7]) + 1], "end_id")
    whole = ask(server, ids)
    word = whole.text[len(whole.text) // 2 :][:6]
    stopped = server.ask(input_ids=ids, max_tokens=TOKENS, end_id=-1, stop_words=[word])
    assert stopped.finish_reason == "stop_word"
    assert stopped.text == whole.text[: whole.text.index(word)]
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_the_engine_s_statistics_are_on_the_metrics_page(case: tuple[Server, Variant]) -> None:
    server, variant = case
    ask(server, prompt(11, 70))
    page = server.metric(
        "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="tokens_per", model="decode_0"
    )
    assert page == variant.page_tokens
    iterations = server.metric("nv_trt_llm_general_metrics", general_type="iteration_counter")
    assert iterations > 0
    assert server.metric("mooncake_steps_total") > 0


def pid_of(server: Server, model: str) -> int:
    """0 while it has no process."""
    try:
        return stub_of(server, model).pid
    except (AssertionError, psutil.Error):
        return 0


def threads_of(server: Server) -> dict[str, int]:
    names = ("prefill_0", "prefill_1", "decode_0", "decode_1")
    return {name: stub_of(server, name).num_threads() for name in names}


def has_few_more(before: dict[str, int], after: dict[str, int]) -> bool:
    """A pool may not have been full before; one thread for each request would be hundreds more."""
    return all(after[name] <= count + 16 for name, count in before.items())


@pytest.mark.long  # test_connector_phases.py has five hundred requests on the engine alone
@only_tp1
def test_five_hundred_requests_return_leases_pages_and_threads_to_where_they_were(
    case: tuple[Server, Variant],
) -> None:
    server, variant = case
    with ThreadPoolExecutor(16) as pool:  # as many at once as later: pools of threads are full
        list(pool.map(lambda n: ask(server, prompt(n, 120), 4, tenant="warm"), range(64)))
    wait_until(server.is_idle, "an idle start")
    before, files = threads_of(server), sorted(pools_of(server))

    def one(number: int) -> None:
        ids = prompt(number % 50, 60 + number % 150)
        if number % 10 == 9:  # some leave
            stream = server.stream(input_ids=ids, max_tokens=400, end_id=-1, stream=True)
            stream.next()
            stream.leave()
            return
        want = wanted(variant, ids, 6)
        assert ask(server, ids, 6, tenant="five hundred").output_ids == want, number

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(500)))
    wait_until(server.is_idle, "pages, slots and leases to be free")
    wait_until(lambda: server.metric("mooncake_store_leases") == 0, "no lease in the store", 15.0)
    wait_until(
        lambda: has_few_more(before, threads_of(server)),
        f"threads as before, {before} and not {threads_of(server)}",
        15.0,
    )
    assert sorted(pools_of(server)) == files


def pools_of(server: Server) -> list[str]:
    prefix = f"mooncake-{server.process.pid}-"
    names = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]
    return [name for name in names if "-pool-" in name]


@only_tp1
def test_a_reloaded_worker_finds_the_kv_that_the_old_one_left(case: tuple[Server, Variant]) -> None:
    server, variant = case
    ids = prompt(21, 4 * B + 1)
    pinned = {"prefill_worker": "prefill_0", "decode_worker": "decode_0", "tenant": "reload"}
    assert ask(server, ids, **pinned).cached_tokens == 0
    old = {name: pid_of(server, name) for name in ("prefill_0", "decode_0")}
    server.edit("prefill_0", "queue_requests_max", "300")
    server.edit("decode_0", "slots", "16")
    for name, pid in old.items():
        wait_until(
            lambda name=name, pid=pid: not psutil.pid_exists(pid) and pid_of(server, name),
            f"{name} to be reloaded",
            60.0,
        )

    def served() -> bool:
        answer = server.ask(input_ids=ids, max_tokens=TOKENS, end_id=-1, parameters=pinned)
        want = wanted(variant, ids)
        return (answer.output_ids, answer.cached_tokens) == (want, 4 * B)

    wait_until(served, "the same answer from the cache", 30.0)


@only_tp1
def test_an_edit_that_is_wrong_is_refused_with_every_mistake_and_the_old_worker_goes_on(
    case: tuple[Server, Variant],
) -> None:
    server, variant = case
    before = (server.repository / "decode_1" / "config.pbtxt").read_text()
    set_parameter(server.repository, "decode_1", "gpu_memory_fraction", "7")
    set_parameter(server.repository, "decode_1", "handoff", "pigeon")
    wait_until(
        lambda: "gpu_memory_fraction is 7" in server.log.read_text(errors="replace"),
        "the refusal in the launcher's words",
        30.0,
    )
    assert "handoff is 'pigeon'" in server.log.read_text(errors="replace")
    ids = prompt(22, 90)
    answer = ask(server, ids, decode_worker="decode_1")
    assert answer.output_ids == wanted(variant, ids)
    (server.repository / "decode_1" / "config.pbtxt").write_text(before)


@only_tp1
def test_a_stream_goes_on_elsewhere_when_its_decode_worker_is_killed(
    case: tuple[Server, Variant],
) -> None:
    server, variant = case

    ids = prompt(30, 150)
    want = wanted(variant, ids, 1500)
    stream = server.stream(
        input_ids=ids, max_tokens=1500, end_id=-1, return_decision=True, stream=True
    )
    answer = stream.begun(20)
    stub_of(server, answer.decision["decode"]).kill()
    rest = stream.all()
    assert not rest.error, rest.error
    assert answer.output_ids + rest.output_ids == want


@only_tp1
def test_a_worker_whose_engine_fails_is_started_again_with_a_fresh_one(
    case: tuple[Server, Variant],
) -> None:
    server, variant = case

    old = wait_until(lambda: pid_of(server, "decode_1"), "decode_1 to be there", 60.0)
    fails = server.repository.parent / "fails"
    fails.write_text("decode_1")

    def is_gone() -> bool:
        if psutil.pid_exists(old):
            server.ask(
                input_ids=prompt(60, 40),
                max_tokens=2,
                end_id=-1,
                parameters={"decode_worker": "decode_1"},
            )
        return not psutil.pid_exists(old)

    try:
        wait_until(is_gone, "the process to end", 60.0)
    finally:
        fails.unlink()
    ids = prompt(60, 100)

    def serves_again() -> bool:
        answer = server.ask(
            input_ids=ids, max_tokens=TOKENS, end_id=-1, parameters={"decode_worker": "decode_1"}
        )
        return answer.output_ids == wanted(variant, ids)

    wait_until(serves_again, "decode_1 to serve again", 60.0)
