"""Small random checkpoints in the format of Hugging Face, made by transformers itself.

`make_checkpoint("qwen3", path)` writes a folder that both transformers and our engine read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
}


def make_checkpoint(
    family: str,
    path: Path,
    *,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random model of this family; `overrides` are keys of its config."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config_class, model_class = FAMILIES[family]
    values = {**SMALL, **(LATENT if family == "deepseek_v3" else {}), **overrides}
    if family == "qwen3":
        values.setdefault("head_dim", 24)  # unlike hidden / heads, as in real Qwen3 models
    model = model_class(config_class(**values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            elif parameter.dim() == 3:  # of all experts
                parameter.copy_(noise * 1.5 / parameter.shape[2] ** 0.5)
            else:  # large enough that attention and output are far from uniform
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def edit_config(path: Path, **values: Any) -> None:
    """Change keys of config.json; None removes a key."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.update(values)
    file.write_text(json.dumps({key: item for key, item in config.items() if item is not None}))


def use_old_rope_keys(path: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    edit_config(path, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The same folder as transformers reads it, ready for inference."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()  # type: ignore[no-untyped-call]
