"""Models that only vLLM has among our engines: the same tokens as plain vLLM, cold and cached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.e2e.server import Server, wait_until
from tests.vllm.serving import BORDERS, plain_tokens, prompts_of, random_checkpoint, serving

pytestmark = pytest.mark.torture

TOKENS = 24
PAGE_TOKENS = {"deepseek_v3": 16}  # vLLM has only this for latent attention on a CPU


@dataclass
class Family:
    server: Server
    continues: bool  # prefill may go on after a prefix
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=["qwen3_moe", "gemma3", "deepseek_v3"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = random_checkpoint(request.param, folder / "checkpoint")
    prompts = prompts_of(BORDERS, seed=11)
    altered = [[*prompts[-1][:5], 7, *prompts[-1][6:]]]
    *expected, of_altered = plain_tokens(checkpoint, prompts + altered, TOKENS)
    assert of_altered != expected[-1], "the answer does not depend on the KV of the first block"
    page = {"page_tokens": str(PAGE_TOKENS.get(request.param, 32))}
    for server in serving(folder, folder / "state", checkpoint, parameters=page):
        # On CPUs without AMX vLLM cannot go on after a prefix with latent attention.
        continues = request.param != "deepseek_v3" or torch.cpu._is_amx_tile_supported()
        yield Family(server, continues, prompts, expected)


def test_prompts_at_block_borders_get_the_tokens_of_plain_vllm_cold_and_cached(
    family: Family,
) -> None:
    for is_cached in (False, True):
        for prompt, expected in zip(family.prompts, family.expected, strict=True):
            answer = family.server.ask(input_ids=prompt, max_tokens=TOKENS, end_id=-1)
            assert (answer.error, answer.output_ids) == ("", expected), len(prompt)
            assert bool(answer.cached_tokens) == (is_cached and family.continues)
    wait_until(family.server.is_idle, "the last pages and leases to go")
