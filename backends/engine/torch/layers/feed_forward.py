"""The feed-forward part of a layer, dense or with experts, computed for each token separately.

Mixture of experts as in DeepSeek-V3: each token uses a few routed experts, and the shared experts.
A routed expert's score is a sigmoid in float32. A correction bias per expert is added to choose
experts, but not to weight their results. Routed experts are in groups. A group's rank is the sum of
its two best biased scores, and only experts of the best groups can be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from backends.engine.model_config import ExpertsConfig
from backends.engine.torch import native_layers
from backends.engine.torch.linear import Linear
from backends.engine.torch.step_plan import rounded_rows


class FeedForward(Protocol):
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """residual + feed_forward(normed), all [rows, hidden].

        `residual` may be overwritten, so use only the result.
        """
        ...


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """down(silu(gate) * up)."""

    gate_up: Linear  # gate's rows, then up's
    down: Linear

    def inner(self, normed: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        both = self.gate_up(normed)
        if native_layers.serves(both):
            return native_layers.gate_rows(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return self.down.add_to(residual, self.inner(normed))


class Router:
    def __init__(
        self, config: ExpertsConfig, weight: torch.Tensor, correction: torch.Tensor
    ) -> None:
        """weight [experts, hidden] and correction [experts], float32."""
        self._config = config
        self._weight_t = weight.t().contiguous()
        self._correction = correction

    def choose(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """normed [rows, hidden] -> expert indices (int64) and weights (float32) [rows, chosen]."""
        config = self._config
        scores = (normed.float() @ self._weight_t).sigmoid()
        ranked = scores + self._correction
        of_groups = ranked.view(len(ranked), config.groups, -1)
        best = of_groups.topk(2, dim=-1).values.sum(-1)
        groups = best.topk(config.chosen_groups, dim=-1).indices
        is_excluded = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
        ranked = of_groups.masked_fill(is_excluded.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = ranked.topk(config.chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.are_weights_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * config.weights_factor


@dataclass(frozen=True, slots=True)
class ExpertsFeedForward:
    router: Router
    experts: Sequence[DenseFeedForward]
    shared: DenseFeedForward

    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Sorts tokens by expert, so that each expert computes its tokens in one product."""
        chosen, weights = self.router.choose(normed)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        order = chosen.flatten().argsort(stable=True)
        rows = order // chosen.shape[1]
        weights = weights.flatten()[order].to(normed.dtype).unsqueeze(1)
        made = torch.zeros_like(normed)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count == 0:
                continue
            own = slice(first, first + count)
            # Padding keeps the number of different shapes small (see `rounded_rows`).
            inputs = normed.new_zeros(rounded_rows(count), normed.shape[1])
            inputs[:count] = normed[rows[own]]
            output = expert.down(expert.inner(inputs))[:count]
            made.index_add_(0, rows[own], output * weights[own])
            first += count
        return self.shared.add_to(residual + made, normed)
