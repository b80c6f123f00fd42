"""The stand-in itself: without a connector it computes what its model says, in every mode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("trtllm")


def make_executor(shape: dict[str, Any] | None = None, **arguments: Any) -> Any:
    from tensorrt_llm._fake.executor import Executor
    from tensorrt_llm._fake.kv_model import KvShape
    from tensorrt_llm.llmapi.llm_args import KvCacheConfig, TorchLlmArgs

    cache = KvCacheConfig(tokens_per_block=4, max_tokens=512, enable_partial_reuse=False)
    return Executor(
        TorchLlmArgs(**{"kv_cache_config": cache, **arguments}), KvShape(**(shape or {}))
    )


def generate(executor: Any, prompts: list[list[int]], tokens_max: int) -> list[list[int]]:
    from tensorrt_llm._fake.request import LlmRequest

    outputs: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        executor.submit(
            LlmRequest(
                number,
                prompt,
                tokens_max,
                on_output=lambda new, _, n=number: outputs[n].extend(new),
            )
        )
    executor.run_until_idle()
    return outputs


def prompts_of(lengths: list[int]) -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(2048) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("is_overlapping", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_it_computes_what_its_model_says(is_overlapping: bool, tp_size: int) -> None:
    from tensorrt_llm._fake.kv_model import KvShape, reference_tokens

    executor = make_executor(
        disable_overlap_scheduler=not is_overlapping,
        tensor_parallel_size=tp_size,
        max_num_tokens=24,
        enable_chunked_prefill=True,
    )
    prompts = prompts_of([1, 4, 5, 31, 64])
    expected = [reference_tokens(KvShape(), prompt, 6) for prompt in prompts]
    assert generate(executor, prompts, 6) == expected
    assert generate(executor, prompts, 6) == expected, "with its own pages reused"
    assert executor.blocks.reused_blocks > 0
    assert executor.blocks.free_blocks == executor.blocks.blocks
    executor.shutdown()


def test_of_a_latent_every_rank_reads_its_own_pages() -> None:
    from tensorrt_llm._fake.kv_model import KvShape, RankModel, whole_sum

    shape = KvShape(kv_factor=1, kv_heads=1)
    ranks = [RankModel(shape, rank, 2, blocks=4) for rank in range(2)]
    for rank in ranks:
        rank.write([2, 0], 0, [7, 8, 9, 10, 11])
    assert torch.equal(ranks[0].kv, ranks[1].kv) and list(ranks[0].kv.shape) == [4, 3, 1, 32]
    right = whole_sum(shape, [rank.state_sum([2, 0], 5) for rank in ranks])
    ranks[1].kv.view(torch.uint8)[2, 1, 0, 5] ^= 1
    assert right != whole_sum(shape, [rank.state_sum([2, 0], 5) for rank in ranks])


def test_a_wrong_byte_anywhere_changes_the_tokens() -> None:
    prompts = prompts_of([12])
    for page, layer, kv in ((0, 0, 0), (1, 2, 1), (2, 1, 0)):
        executor = make_executor(disable_overlap_scheduler=True)
        good = generate(executor, prompts, 3)
        cached = list(executor.blocks._cached.values())
        executor.ranks[0].kv.view(torch.uint8)[cached[page], layer, kv, 5] ^= 1
        longer = [prompts[0] + good[0]]
        from tensorrt_llm._fake.kv_model import KvShape, reference_tokens

        wrong = generate(executor, longer, 3)
        assert wrong != [reference_tokens(KvShape(), longer[0], 3)]
        executor.shutdown()


def test_native_hand_over_continues_in_another_executor() -> None:
    from tensorrt_llm._fake.kv_model import KvShape, reference_tokens
    from tensorrt_llm._fake.request import LlmRequest

    prefill, decode = make_executor(), make_executor()
    (prompt,) = prompts_of([10])
    context = LlmRequest(1, prompt, 8, kind="context_only")
    prefill.submit(context)
    prefill.run_until_idle()
    first, *rest = reference_tokens(KvShape(), prompt, 5)
    assert context.tokens[-1] == first and context.finish_reason == "length"
    output: list[int] = []
    decode.submit(
        LlmRequest(
            2,
            prompt,
            5,
            kind="generation_only",
            opaque_state=context.opaque_state,
            on_output=lambda new, _: output.extend(new),
        )
    )
    decode.run_until_idle()
    assert output == rest
    for executor in (prefill, decode):
        executor.shutdown()
