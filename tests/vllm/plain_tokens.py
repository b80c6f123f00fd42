"""What plain vLLM answers: a program for the interpreter that has vLLM.

    .venv-vllm/bin/python -m tests.vllm.plain_tokens < ASKED > ANSWERS

ASKED is JSON: `model`, `prompts` (lists of token ids), `tokens` (of each answer), `arguments` of
vLLM's LLM. ANSWERS is a JSON list with the greedy token ids of each prompt. Each prompt runs
alone, and without a prefix cache.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answers(asked: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        asked["model"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**28,
        **asked.get("arguments", {}),
    )
    params = SamplingParams(
        max_tokens=asked["tokens"], temperature=0.0, ignore_eos=True, detokenize=False
    )
    found = []
    for prompt in asked["prompts"]:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        found.append(list(answer.outputs[0].token_ids))
    return found


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # vLLM prints there
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    found = answers(json.load(sys.stdin))
    with os.fdopen(output, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
