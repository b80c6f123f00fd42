"""Rotary position embedding: a table of cosines and sines of every position, computed once.

Angles are computed in float32 as in transformers, so logits agree except for the last bits. A head
x of size D is rotated to  x * cos + roll(x, D/2) * sin.  The sines in the table are [-sin, sin],
with the sign of transformers' rotate_half. Three tensor operations rotate all heads of q and k.
"""

from __future__ import annotations

import math

import torch

from backends.engine.model_config import RopeConfig
from backends.engine.torch.mixed_products import activations_dtype


def rope_table(
    rope: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[positions, 2, head_dim]: cosines, signed sines, in the dtype of activations.

    `head_dim`: rotated scalars of a head; `dtype`: of the model's weights.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _frequencies(rope, head_dim))
    cosines, sines = angles.cos() * rope.table_factor, angles.sin() * rope.table_factor
    table = torch.stack(
        [torch.cat([cosines, cosines], dim=1), torch.cat([-sines, sines], dim=1)], dim=1
    )
    return table.to(device=device, dtype=activations_dtype(dtype, device))


def rotate_in_place(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotate heads [tokens, any, D]; cosines and sines [tokens, 1, D] of the tokens' positions."""
    rolled = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cosines).addcmul_(rolled, sines)


def _frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    assert rope.type == "default", rope.type
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3: divides low frequencies by `factor`, keeps high ones, blends those between them."""
    wavelengths = 2 * math.pi / frequencies
    context = rope.original_context_tokens
    smooth = (context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    is_slow = wavelengths > context / rope.low_freq_factor
    is_fast = wavelengths < context / rope.high_freq_factor
    return torch.where(
        is_slow, frequencies / rope.factor, torch.where(is_fast, frequencies, blended)
    )


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN: divides low frequencies by `factor`, keeps high ones, and blends linearly over the
    dimensions between them. As in transformers' `_compute_yarn_parameters`."""

    def dimension(turns: float) -> float:
        length = rope.original_context_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high: float = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = torch.clamp(
        (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1
    )
    powers = 1.0 / frequencies
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
