"""Greedy answers of tensorrt_llm alone: `plain_llm.py FOLDER IN.json OUT.json`, without connector.

In a process of its own, so that its GPU memory is free again when the answers are there.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def answers(llm: Any, job: dict[str, Any]) -> list[list[int]]:
    from tensorrt_llm import SamplingParams

    sampling = SamplingParams(
        max_tokens=job["tokens"], end_id=-1, pad_id=0, ignore_eos=True, detokenize=False
    )
    results = [
        llm.generate_async({"prompt_token_ids": ids}, sampling_params=sampling)
        for ids in job["prompts"]
    ]
    return [list((await result).outputs[0].token_ids) for result in results]


def main() -> None:
    folder, given, taken = sys.argv[1:]
    job = json.loads(Path(given).read_text())
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import llm_args

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        model_kwargs={"torch_dtype": job["dtype"], "dtype": job["dtype"]},  # as for workers
        max_seq_len=job["context_tokens"],
        kv_cache_config=llm_args.KvCacheConfig(
            max_tokens=job["kv_tokens"],
            free_gpu_memory_fraction=0.3,
            tokens_per_block=job["page_tokens"],
            enable_block_reuse=False,
        ),
    )
    Path(taken).write_text(json.dumps(asyncio.run(answers(llm, job))))
    llm.shutdown()


if __name__ == "__main__":  # TensorRT-LLM may start processes that import this file
    main()
