"""Three hosts serve as one: KV crosses them, and whatever dies costs no token.

Every answer is compared with transformers in one process, or with what it was before.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.backends.engine.reference import Reference
from tests.e2e.server import Answer, Stream, wait_until
from tests.fleet.conftest import CHECKED_TOKENS, LONG_TOKENS
from tests.fleet.site import BACK_S_MAX, NAMES, B, Fleet

pytestmark = pytest.mark.e2e

LAYERS, KV_HEADS, HEAD_DIM, SCALAR_BYTES = 4, 2, 32, 4  # backends/demo_checkpoint/config.json
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * B * HEAD_DIM * SCALAR_BYTES
WORKERS = {"prefill_a_0", "prefill_c_0", "decode_b_0", "decode_c_0"}
LONG_BEFORE = 20  # tokens of a long answer that are there when something happens


def fresh_prompt(number: int, blocks: int = 4) -> list[int]:
    return [20 + (number * 7919 + i * i * (number + 1)) % 2000 for i in range(blocks * B + 5)]


def rest_of(stream: Stream, begun: Answer, reference: Reference) -> None:
    """The answer goes on to its end as if nothing had happened."""
    rest = stream.all()
    assert not rest.error, rest.error
    assert begun.output_ids + rest.output_ids == reference.token_ids


def is_whole(fleet: Fleet) -> bool:
    return fleet.workers().keys() >= WORKERS and {"a0", "b0", "c0"} <= fleet.nodes()


def wait_whole(fleet: Fleet) -> None:
    """Every worker and node is in the directory, and both frontends use them."""
    wait_until(lambda: is_whole(fleet), "all workers and nodes to be there", BACK_S_MAX)
    for frontend in ("a", "b"):
        for worker in sorted(WORKERS):
            fleet.wait_serves(frontend, **{worker.partition("_")[0]: worker})


@pytest.mark.parametrize(("prefill", "decode"), [("a", "b"), ("c", "b"), ("a", "c")])
def test_a_request_prefilled_on_one_host_decodes_on_another_over_nixl(
    fleet: Fleet, story: list[int], reference: Reference, prefill: str, decode: str
) -> None:
    pins = {"prefill": f"prefill_{prefill}_0", "decode": f"decode_{decode}_0"}
    before = fleet.nixl_read_bytes(decode, pins["decode"])
    answer = fleet.ask("a", story, CHECKED_TOKENS, tenant=prefill + decode, **pins)
    assert not answer.error, answer.error
    assert {role: answer.decision[role] for role in pins} == pins
    assert answer.output_ids == reference.token_ids[:CHECKED_TOKENS]
    kv_bytes = 4 * BLOCK_BYTES  # three whole blocks and the tail
    wait_until(
        lambda: fleet.nixl_read_bytes(decode, pins["decode"]) - before >= kv_bytes,
        f"{pins['decode']} to have read {kv_bytes} bytes over NIXL",
    )


def test_no_host_maps_the_memory_of_another(fleet: Fleet) -> None:
    """They share a kernel and its /dev/shm, and are told apart all the same."""
    nodes = fleet.asked(lambda client: client.nodes())
    assert len({info.host_id for info in nodes}) == 3
    segments = {info.segment_path: info.node_id for info in nodes}
    for host, names in {
        "a": ["prefill_a_0"],
        "b": ["decode_b_0"],
        "c": ["prefill_c_0", "decode_c_0"],
    }.items():
        for name in names:
            [process] = fleet.hosts[host].processes(name)
            mapped = {
                segments[each.path] for each in process.memory_maps() if each.path in segments
            }
            assert mapped == {f"{host}0"}, name


def test_a_hot_prefix_is_copied_to_a_third_host(fleet: Fleet) -> None:
    prompt = fresh_prompt(1)
    with ThreadPoolExecutor(8) as pool:  # 64 hits fading over a minute: nearly one a second
        answers = list(
            pool.map(
                lambda _: fleet.ask("a", prompt, 1, prefill="prefill_a_0", decode="decode_b_0"),
                range(64),
            )
        )
    assert not [answer.error for answer in answers if answer.error]
    wait_until(
        lambda: all({"a0", "c0"} <= held for held in fleet.holders(prompt) or [set()]),
        "every block of a hot prefix to be on a and on c",
        BACK_S_MAX,
    )


@pytest.mark.long  # a lost host is lost to its pair too, and tests of network cards cut links
def test_cutting_two_hosts_apart_in_the_middle_of_a_stream_costs_no_token(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    """The pair is chosen freely, so that another one may go on; the one that is cut off is known
    when its first tokens are there."""
    stream = fleet.stream("a", story, LONG_TOKENS, tenant="cut")
    begun = fleet.begun(stream, LONG_BEFORE)
    other = "b" if begun.decision["decode"] == "decode_b_0" else "c"
    with fleet.namespaces.cut("a", other):
        began_s = time.monotonic()
        rest_of(stream, begun, reference)
        print(f"cut from {other}: the rest came after {time.monotonic() - began_s:.1f} s")
    wait_whole(fleet)


@pytest.mark.long  # tests of elected directories and tests/e2e/test_failures.py kill one each
def test_killing_the_leading_directory_costs_no_token_and_no_cached_prefix(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    prompt = fresh_prompt(2)
    assert not fleet.ask("a", prompt, 2, prefill="prefill_a_0").error
    streams = [fleet.stream(frontend, story, LONG_TOKENS, tenant="leader") for frontend in "ab"]
    begun = [fleet.begun(stream, LONG_BEFORE) for stream in streams]
    leader, host = fleet.leader(), fleet.leading_host()
    fleet.hosts[host].kill("directory")
    for stream, answer in zip(streams, begun, strict=True):
        rest_of(stream, answer, reference)
    wait_until(lambda: fleet.leader() not in (None, leader), "another reign", BACK_S_MAX)

    def is_found() -> bool:
        answer = fleet.ask("b", prompt, 2, prefill="prefill_a_0")
        return not answer.error and answer.cached_tokens == 4 * B

    wait_until(is_found, "the cached prefix to be found", BACK_S_MAX)
    wait_until(lambda: fleet.hosts[host].processes("directory"), "it to be started again")
    wait_whole(fleet)


@pytest.mark.long
def test_killing_a_member_of_etcd_is_not_noticed_and_it_comes_back(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    streams = [fleet.stream(frontend, story, LONG_TOKENS, tenant="etcd") for frontend in "ab"]
    begun = [fleet.begun(stream, LONG_BEFORE) for stream in streams]
    for host in "bc":  # one after the other: each is back before the next one goes
        [killed] = fleet.hosts[host].kill("etcd")
        wait_until(
            lambda host=host, killed=killed: any(
                process.pid != killed for process in fleet.hosts[host].processes("etcd")
            ),
            "the member to be started again",
            BACK_S_MAX,
        )
    for stream, answer in zip(streams, begun, strict=True):
        rest_of(stream, answer, reference)
    wait_whole(fleet)


def test_losing_a_whole_host_costs_no_token_and_it_comes_back_anew(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    before = fleet.workers()
    streams = [
        fleet.stream(
            frontend, story, LONG_TOKENS, tenant="host", prefill="prefill_a_0", decode=decode
        )
        for frontend, decode in (("a", "decode_b_0"), ("b", "decode_b_0"))
    ]
    free = fleet.stream("b", story, LONG_TOKENS, tenant="host")
    begun = [fleet.begun(stream, LONG_BEFORE) for stream in (*streams, free)]
    fleet.hosts["c"].kill_all()
    for stream, answer in zip((*streams, free), begun, strict=True):
        rest_of(stream, answer, reference)
    assert not fleet.ask("a", fresh_prompt(3), 8).error, "requests elsewhere go on"
    wait_until(
        lambda: not {"prefill_c_0", "decode_c_0"} & fleet.workers().keys(),
        "the workers of c to have left",
        BACK_S_MAX,
    )
    fleet.start("c")
    wait_whole(fleet)
    after = fleet.workers()
    assert all(before[name] != after[name] for name in ("prefill_c_0", "decode_c_0"))
    answer = fleet.ask("a", story, CHECKED_TOKENS, prefill="prefill_c_0", decode="decode_c_0")
    assert answer.output_ids == reference.token_ids[:CHECKED_TOKENS]


@pytest.mark.long
def test_a_host_that_is_stopped_hands_its_requests_over(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    streams = [fleet.stream(frontend, story, LONG_TOKENS, tenant="leave") for frontend in "abab"]
    begun = [fleet.begun(stream, LONG_BEFORE) for stream in streams]
    assert fleet.hosts["c"].stop() == 0
    for stream, answer in zip(streams, begun, strict=True):
        rest_of(stream, answer, reference)
    assert "c0" not in fleet.nodes(), "it said goodbye"
    assert not {"prefill_c_0", "decode_c_0"} & fleet.workers().keys(), "so did both workers of c"
    fleet.start("c")
    wait_whole(fleet)


@pytest.mark.long
def test_without_a_quorum_streams_go_on_and_hosts_say_what_is_missing(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    streams = [fleet.stream(frontend, story, LONG_TOKENS, tenant="quorum") for frontend in "ab"]
    begun = [fleet.begun(stream, LONG_BEFORE) for stream in streams]
    with fleet.hosts["b"].freeze("etcd"), fleet.hosts["c"].freeze("etcd"):
        for stream, answer in zip(streams, begun, strict=True):
            rest_of(stream, answer, reference)
        wait_until(
            lambda: "etcd has no quorum: 1 of 3" in fleet.said("a"),
            "the launcher's word",
            BACK_S_MAX,
        )
        assert fleet.leader() is None
    wait_whole(fleet)
    for host in NAMES:
        wait_until(
            lambda host=host: "a directory leads at" in fleet.said(host).rpartition("no quorum")[2],
            "its word that all is well again",
            BACK_S_MAX,
        )


@pytest.mark.long
def test_a_host_that_is_cut_off_from_all_others_is_left_and_comes_back(
    fleet: Fleet, story: list[int], reference: Reference
) -> None:
    """Nothing on it dies: its workers leave the pools, its requests go on elsewhere, and when the
    link is back it takes part again by itself."""
    before = fleet.workers()
    streams = [fleet.stream(frontend, story, LONG_TOKENS, tenant="island") for frontend in "abab"]
    begun = [fleet.begun(stream, LONG_BEFORE) for stream in streams]
    with fleet.namespaces.cut("c"):
        for stream, answer in zip(streams, begun, strict=True):
            rest_of(stream, answer, reference)
        wait_until(
            lambda: not {"prefill_c_0", "decode_c_0"} & fleet.workers().keys(),
            "the workers of c to have left",
            BACK_S_MAX,
        )
        answer = fleet.ask("b", fresh_prompt(4), 8)
        assert not answer.error, answer.error
    wait_whole(fleet)
    assert fleet.workers() == before, "the same processes"


@pytest.mark.long
def test_one_host_s_link_goes_down_for_a_while_under_load(fleet: Fleet) -> None:
    """Requests one after the other through both frontends; none may fail or differ."""
    prompts = [fresh_prompt(100 + number) for number in range(4)]
    alone = [fleet.ask("a", prompt, 40, tenant="alone").output_ids for prompt in prompts]

    def served(number: int) -> list[int]:
        answer = fleet.ask("ab"[number % 2], prompts[number % 4], 40, tenant=f"load-{number}")
        assert not answer.error, answer.error
        return answer.output_ids

    with ThreadPoolExecutor(4) as pool:
        link = fleet.namespaces.link("c", up=False)
        pending = [pool.submit(served, number) for number in range(40)]
        wait_until(lambda: "decode_c_0" not in fleet.workers(), "c to be missed", BACK_S_MAX)
        link.undo()
        pending += [pool.submit(served, number) for number in range(40, 80)]
        for number, future in enumerate(pending):
            assert future.result() == alone[number % 4], number
    wait_whole(fleet)
