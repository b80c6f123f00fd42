"""The feed-forward part of a layer, computed for each token separately."""

from __future__ import annotations

from typing import Protocol

import torch

from backends.engine.torch.linear import GatedLinear, Linear


class FeedForward(Protocol):
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """residual + feed_forward(normed), all [rows, hidden].

        It may change `residual`: use only the result.
        """
        ...


class DenseFeedForward:
    """down(silu(gate) * up)."""

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return self.down.add_to(residual, self.gate_up(normed))
