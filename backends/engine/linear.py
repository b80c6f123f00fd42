"""Matrix products with weights: the one place that knows which library is fast at them.

Not here: products of activations with activations (attention.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """x @ weight.T + bias, for a weight [outputs, inputs]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """residual + the product; may or may not change `residual`, so use only the result."""
        if self.bias is not None:
            residual = residual + self.bias
        return residual.addmm_(inputs, self.weight.t())


class GatedLinear:
    """silu(x @ gate.T) * (x @ up.T): the first half of the feed-forward of these models."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:  # gate rows, then up rows
        self.both = Linear(weight, bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(inputs).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
