"""The pools are real: KV crosses nodes over NIXL, prefixes spread, generated blocks are reused."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake_store.block_keys import block_keys, chain_seed
from mooncake_store.directory.client import DirectoryClient
from tests.e2e.server import Answer, Server, wait_until

B = 64


@pytest.fixture
def prompt(seed: int, request: pytest.FixtureRequest) -> list[int]:
    """Fresh tokens for each test, so that nothing of it is cached."""
    chance = random.Random(f"{seed} {request.node.name}")
    return [chance.randrange(16, 2048) for _ in range(16 * B + 5)]


def ask(server: Server, prompt: list[int], prefill: str = "", decode: str = "", **inputs) -> Answer:
    pins = {"prefill_worker": prefill, "decode_worker": decode}
    inputs = {"max_tokens": 4, "end_id": -1, **inputs}
    answer = server.ask(
        input_ids=prompt,
        return_decision=True,
        parameters={name: worker for name, worker in pins.items() if worker},
        **inputs,
    )
    assert not answer.error, answer.error
    return answer


def nixl_read_bytes(server: Server, worker: str) -> float:
    return server.metric(
        "mooncake_transfer_bytes_total", transport="nixl", direction="read", model=worker
    )


def directory_address(server: Server) -> str:
    (line,) = [
        line
        for line in (
            server.state_dir / f"logs-{server.addresses.http.split(':')[1]}" / "directory.log"
        )
        .read_text()
        .splitlines()
        if line.startswith("ready address=")
    ]
    return line.split("address=")[1].split()[0]


def holders(server: Server, prompt: list[int]) -> list[set[str]]:
    """Which nodes hold each full block of the prompt, as the directory itself says."""
    with DirectoryClient(directory_address(server)) as client:
        [fingerprint] = {worker.fingerprint for worker in client.workers()}
        keys = block_keys(np.array(prompt), B, chain_seed(fingerprint))
        found = client.lookup(keys, "test", 0.0)
    return [{copy.node_id for copy in copies} for copies in found]


def test_a_prompt_prefilled_on_one_node_decodes_on_the_other_over_nixl(
    demo: Server, prompt: list[int]
) -> None:
    before = nixl_read_bytes(demo, "decode_1")
    answer = ask(demo, prompt, "prefill_0", "decode_1")
    assert (answer.decision["prefill"], answer.decision["decode"]) == ("prefill_0", "decode_1")
    kv_bytes = 17 * demo_block_bytes(demo)  # 16 full blocks and the tail
    wait_until(
        lambda: nixl_read_bytes(demo, "decode_1") - before >= kv_bytes,
        f"decode_1 to have read {kv_bytes} bytes over NIXL",
    )
    # A layer that was announced and is not here in time is read again with its block.
    assert kv_bytes <= answer.decision["decode_read_bytes"]["nixl"] <= 2 * kv_bytes


def demo_block_bytes(server: Server) -> int:
    layers, kv_heads, head_dim, scalar_bytes = 4, 2, 32, 4  # backends/demo_checkpoint/config.json
    return layers * 2 * kv_heads * B * head_dim * scalar_bytes


def test_a_decode_worker_on_the_same_node_reads_nothing_over_nixl(
    demo: Server, prompt: list[int]
) -> None:
    before = nixl_read_bytes(demo, "decode_0")
    answer = ask(demo, prompt, "prefill_0", "decode_0")
    assert answer.decision["decode_read_bytes"].get("nixl", 0) == 0
    assert nixl_read_bytes(demo, "decode_0") == before


def test_layers_are_handed_over_while_prefill_still_computes(
    demo: Server, prompt: list[int]
) -> None:
    long_prompt = prompt + prompt[::-1]  # several chunks
    answer = ask(demo, long_prompt, "prefill_0", "decode_1")
    assert answer.decision["loaded_early_blocks"] > 0


def test_a_prefix_sent_twenty_times_in_a_burst_ends_on_both_nodes(
    demo: Server, prompt: list[int]
) -> None:
    ask(demo, prompt, "prefill_0", "decode_0")
    wait_until(lambda: holders(demo, prompt) == [{"s0"}] * 16, "one copy, on s0")
    before = demo.metric("mooncake_transfer_bytes_total", transport="nixl", direction="read")
    answers: list[Answer] = []

    def are_both_used() -> bool:
        with ThreadPoolExecutor(20) as pool:
            answers.extend(
                pool.map(lambda tail: ask(demo, [*prompt, tail], max_tokens=8), range(20, 40))
            )
        used = {answer.decision["prefill"] for answer in answers[-20:]}
        return used == {"prefill_0", "prefill_1"}

    wait_until(are_both_used, "a burst that one worker alone does not take", 60.0)
    wait_until(lambda: holders(demo, prompt) == [{"s0", "s1"}] * 16, "a copy on each node")
    after = demo.metric("mooncake_transfer_bytes_total", transport="nixl", direction="read")
    assert after > before
    assert all(answer.cached_tokens >= 16 * B for answer in answers)


def test_a_prompt_sent_again_is_cached_but_for_its_last_token(
    demo: Server, prompt: list[int]
) -> None:
    exact = prompt[: 16 * B]
    assert ask(demo, exact).cached_tokens == 0
    assert ask(demo, exact).cached_tokens == 16 * B - 1
    assert ask(demo, prompt).cached_tokens == 16 * B


def test_the_next_turn_finds_the_blocks_that_decode_generated(
    demo: Server, prompt: list[int]
) -> None:
    start = prompt[: B - 10]
    answer = ask(demo, start, max_tokens=2 * B)
    turn = [*start, *answer.output_ids, *prompt[:20]]
    generated_blocks = (len(start) + 2 * B - 1) // B  # the last token's KV was never computed
    again = wait_until(
        lambda: (
            (found := ask(demo, turn, max_tokens=1)).cached_tokens >= generated_blocks * B and found
        ),
        "the generated blocks to be found",
    )
    assert again.cached_tokens == generated_blocks * B


def test_tenants_share_no_kv(demo: Server, prompt: list[int]) -> None:
    def cached(tenant: str) -> int:
        answer = demo.ask(input_ids=prompt, max_tokens=1, parameters={"tenant": tenant})
        return answer.cached_tokens

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") == 16 * B


def test_a_tenants_quota_holds_for_what_serving_stores_and_costs_no_answer(
    demo: Server, prompt: list[int]
) -> None:
    def asked(tenant: str, number: int, prefill: str, decode: str) -> list[int]:
        ids = [*prompt[number:], *prompt[:number]]
        pinned = {"tenant": tenant, "prefill_worker": prefill, "decode_worker": decode}
        answer = demo.ask(input_ids=ids, max_tokens=2 * B, end_id=-1, parameters=pinned)
        assert not answer.error, answer.error
        return answer.output_ids

    with DirectoryClient(directory_address(demo)) as client:
        asked("free", 0, "prefill_0", "decode_0")
        (worker, *_) = client.workers()
        quota_bytes = 20 * worker.block_bytes  # of one request's 17 blocks and two that decode adds
        client.set_quota("bounded", quota_bytes)
        client.set_quota("tiny", 3 * worker.block_bytes)
        for number in range(2):
            for prefill, decode in (
                ("prefill_0", "decode_0"),
                ("prefill_0", "decode_1"),
                ("prefill_1", "decode_1"),
            ):
                expected = asked("free", number, prefill, decode)
                for tenant in ("bounded", "tiny"):
                    assert asked(tenant, number, prefill, decode) == expected, tenant
                    for name, used_bytes, most_bytes in client.stats().tenants:
                        assert 0 <= used_bytes <= most_bytes, name
        used = {name: used_bytes for name, used_bytes, _ in client.stats().tenants}
        assert used["bounded"] > quota_bytes / 2 and used["tiny"] > 0
        client.set_quota("bounded", 0)
        client.set_quota("tiny", 0)


def test_a_hot_prefix_is_copied_to_the_other_node_without_a_request_there(
    demo: Server, prompt: list[int]
) -> None:
    with ThreadPoolExecutor(8) as pool:  # 160 hits fading over a minute: two a second
        list(
            pool.map(lambda _: ask(demo, prompt, "prefill_0", "decode_0", max_tokens=1), range(160))
        )
    wait_until(lambda: {"s0", "s1"} in holders(demo, prompt), "a hot block to be copied to s1")
    wait_until(demo.is_idle, "pages, slots and leases to be free")


def test_every_worker_told_the_rate_and_latency_of_every_node_as_it_measured_them(
    demo: Server,
) -> None:
    with DirectoryClient(directory_address(demo)) as client:
        workers = client.workers()
    assert len(workers) >= 4
    for worker in workers:
        assert set(worker.transfer_bytes_per_s) == set(worker.transfer_latency_s) == {"s0", "s1"}
    measured = [s for worker in workers for s in worker.transfer_latency_s.values()]
    assert all(0 < latency_s < 1 for latency_s in measured) and len(set(measured)) > 1
