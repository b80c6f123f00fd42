"""A random checkpoint all of whose layers have a sliding window, as the first Mistral had."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.random_checkpoints import COMMON

WINDOW_TOKENS = 96


def write_mistral(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.MistralConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        sliding_window=WINDOW_TOKENS,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )
