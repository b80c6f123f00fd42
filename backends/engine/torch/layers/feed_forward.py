"""The feed-forward half of a layer: what is added to the hidden states of each token by itself."""

from __future__ import annotations

from typing import Protocol

import torch

from backends.engine.torch.linear import GatedLinear, Linear


class FeedForward(Protocol):
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """residual and normed [rows, hidden] -> their sum with what this makes of `normed`.

        May or may not change `residual`: use only the result.
        """
        ...


class DenseFeedForward:
    """down(silu(gate) * up)."""

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return self.down.add_to(residual, self.gate_up(normed))
