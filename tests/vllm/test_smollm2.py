"""SmolLM2-135M in float32 on vLLM, with memory for 32 blocks of KV: the tokens of plain vLLM, for
single prompts and for more at once than the memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.server import ROOT, Answer, Server, wait_until
from tests.vllm.serving import BORDERS, plain_tokens, prompts_of, serving

CHECKPOINT = ROOT / ".mooncake" / "checkpoints" / "smollm2-135m"
pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(
        not CHECKPOINT.exists(), reason="run `mooncake model get smollm2-135m` first"
    ),
]

TOKENS, VOCABULARY, AT_ONCE = 40, 49_152, 16
ADMITTED_S_MAX = 120.0
BLOCKS, BLOCK_BYTES = 32, 30 * 2 * 3 * 64 * 64 * 4  # layers, K and V, heads, head_dim, tokens


@dataclass
class Served:
    server: Server
    prompts: list[list[int]]
    expected: list[list[int]]

    def check(self, index: int) -> int:
        """Asks until it is admitted; cached tokens."""
        answers: list[Answer] = []

        def is_admitted() -> bool:
            prompt = self.prompts[index]
            answers.append(self.server.ask(input_ids=prompt, max_tokens=TOKENS, end_id=-1))
            return not answers[-1].error.startswith("rejected kind=")

        wait_until(is_admitted, f"prompt {index} to be admitted", ADMITTED_S_MAX)
        answer = answers[-1]
        assert (answer.error, answer.output_ids) == ("", self.expected[index]), index
        return answer.cached_tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("smollm2")
    chosen = (*BORDERS, *(300 + 9 * number for number in range(AT_ONCE)))
    prompts = prompts_of(chosen, seed=41, vocabulary_tokens=VOCABULARY)
    expected = plain_tokens(CHECKPOINT, prompts, TOKENS)
    memory = {"kv_bytes": str(BLOCKS * BLOCK_BYTES)}
    for server in serving(folder, folder / "state", CHECKPOINT, parameters=memory):
        yield Served(server, prompts, expected)


def test_prompts_at_block_borders_get_the_tokens_of_plain_vllm_cold_and_cached(
    served: Served,
) -> None:
    for index, tokens in enumerate(BORDERS):
        assert served.check(index) == 0
        assert served.check(index) >= (tokens - 1) // 64 * 64
    wait_until(served.server.is_idle, "the last pages and leases to go")


def test_more_requests_than_the_memory_holds_get_the_tokens_of_plain_vllm(served: Served) -> None:
    """They wait, or are rejected first, or preempted."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for done in [
            threads.submit(served.check, len(BORDERS) + number) for number in range(AT_ONCE)
        ]:
            done.result()
    wait_until(served.server.is_idle, "the last pages and leases to go")
