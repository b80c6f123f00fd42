"""RMS norm of the last dimension, by the native kernel if it supports the tensor, else by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backends.engine.torch import native_layers


class RmsNorm:
    """RMS norm. Most of its weights are folded into matrices (weights.py), so `weight` is rare."""

    def __init__(self, epsilon: float, like: torch.Tensor) -> None:
        """`like`: a tensor with the device and dtype of the inputs."""
        self.epsilon = epsilon
        self.is_native = native_layers.serves(like)

    def __call__(self, values: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """values [..., width], weight [width] -> a new tensor of the same shape."""
        if self.is_native and values.dim() == 2:
            return native_layers.norm_rows(values, self.epsilon, weight)
        normed = F.rms_norm(values, (values.shape[-1],), None, self.epsilon)
        return normed if weight is None else normed.mul_(weight)
