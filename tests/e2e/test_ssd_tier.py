"""Prompts that no longer fit into DRAM come back from SSD, with the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.records.status import DirectoryStats
from tests.e2e.server import Server, running, wait_until

pytestmark = pytest.mark.long

BLOCK_TOKENS = 64
PROMPT_BLOCKS = 12
PROMPTS = 24  # 24 x 12 blocks of 128 KiB on two nodes of 12 MiB


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Server]:
    """Nodes with little DRAM and an SSD in a folder of the test's own."""
    arguments = ["--store-bytes", "12M", "--ssd-bytes", "256M", "--ssd-path", str(tmp_path / "ssd")]
    yield from running(tmp_path, tmp_path / "state", {}, arguments)


def stats(server: Server) -> DirectoryStats:
    log = server.state_dir / f"logs-{server.addresses.http.split(':')[1]}" / "directory.log"
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("ready address=")]
    with DirectoryClient(line.split("address=")[1].split()[0]) as client:
        return client.stats()


def test_evicted_prompts_are_restored_from_ssd_and_answer_with_the_same_tokens(
    small: Server, seed: int
) -> None:
    chance = random.Random(seed)
    prompts = [
        [chance.randrange(16, 2048) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS + 5)]
        for _ in range(PROMPTS)
    ]

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        answer = small.ask(input_ids=prompt, max_tokens=6, end_id=-1, return_decision=True)
        assert not answer.error, answer.error
        return answer.output_ids, answer.decision["cached_tokens"]

    first = []
    for number, prompt in enumerate(prompts):
        first.append(ask(prompt)[0])
        # Spilling runs ahead of eviction as long as blocks come no faster than the disk writes.
        least = number * PROMPT_BLOCKS // 2 - 150
        wait_until(lambda least=least: stats(small).spills >= least, "spills to catch up")
    again = [ask(prompt) for prompt in prompts]
    assert [tokens for tokens, _ in again] == first
    found = stats(small)
    assert found.evictions > 50, "everything fitted into DRAM: nothing was shown"
    assert found.hit_ssd_blocks > 50, "no prefix came from the SSD"
    assert found.bad_copies == 0
    shown = ("store_spills_total", "store_restored_blocks_total")
    wait_until(
        lambda: all(small.metric(f"mooncake_{name}") > 50 for name in shown),
        "spills and restored blocks to be on the metrics page",
    )
    cached = sum(tokens for _, tokens in again)
    assert cached > 0.7 * PROMPTS * PROMPT_BLOCKS * BLOCK_TOKENS, f"{cached} tokens were cached"
