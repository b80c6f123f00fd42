"""Small random checkpoints of several families: a program for the interpreter that has vLLM.

    .venv-vllm/bin/python -m tests.vllm.random_checkpoints FAMILY FOLDER

The head is not tied to the embedding, and the weights are large. So a token depends on all KV
before it: with tied embeddings or small weights a model repeats one token, whatever the KV is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY_TOKENS, POSITIONS = 2048, 2048
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def config_of(family: str) -> Any:
    import transformers

    if family == "llama":
        return transformers.LlamaConfig(
            **COMMON, num_key_value_heads=2, head_dim=32, intermediate_size=128
        )
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **COMMON,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
    if family == "gemma3":
        return transformers.Gemma3TextConfig(
            **COMMON,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=128,
            sliding_window=96,
            layer_types=["sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=32,
        )
    assert family == "deepseek_v3", family
    return transformers.DeepseekV3Config(
        **COMMON,
        num_key_value_heads=4,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
    )


def write(family: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    model.save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
