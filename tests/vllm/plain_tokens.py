"""What plain vLLM answers: a program for the interpreter that has vLLM.

    .venv-vllm/bin/python -m tests.vllm.plain_tokens < ASKED > ANSWERS

ASKED is JSON: `model`, `prompts` (lists of token ids), `tokens` (of each answer), `sampling` (of
each prompt, further keywords of SamplingParams), `arguments` of vLLM's LLM. ANSWERS is a JSON list:
of each prompt the greedy token ids, and their logprobs if `sampling` has `logprobs`. Each prompt
runs alone, and without a prefix cache.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def answers(asked: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        asked["model"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=not (Path(asked["model"]) / "tokenizer.json").exists(),
        structured_outputs_config={"backend": "guidance"},
        kv_cache_memory_bytes=2**28,
        **asked.get("arguments", {}),
    )
    found = []
    for prompt, sampling in zip(asked["prompts"], asked["sampling"], strict=True):
        further = dict(sampling)
        if guided := further.pop("structured_outputs", None):
            further["structured_outputs"] = StructuredOutputsParams(**guided)
        params = SamplingParams(
            **{
                "max_tokens": asked["tokens"],
                "temperature": 0.0,
                "ignore_eos": True,
                "detokenize": False,
                **further,
            }
        )
        (answer,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        (output,) = answer.outputs
        token_ids = list(output.token_ids)
        steps = zip(token_ids, output.logprobs or (), strict=False)
        found.append((token_ids, [by_id[token_id].logprob for token_id, by_id in steps]))
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
