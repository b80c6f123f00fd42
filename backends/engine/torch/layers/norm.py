"""RMS norm of the last dimension: native where that serves, else torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backends.engine.torch import native_layers


class RmsNorm:
    """Without a weight of its own: most are folded into the matrix behind (weights.py)."""

    def __init__(self, epsilon: float, like: torch.Tensor) -> None:
        """`like`: of the device and dtype of what it will get."""
        self.epsilon = epsilon
        self.is_native = native_layers.serves(like)

    def __call__(self, values: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """values [..., width], weight [width] -> the same shape, in memory of its own."""
        if self.is_native and values.dim() == 2:
            return native_layers.norm_rows(values, self.epsilon, weight)
        normed = F.rms_norm(values, (values.shape[-1],), None, self.epsilon)
        return normed if weight is None else normed.mul_(weight)
