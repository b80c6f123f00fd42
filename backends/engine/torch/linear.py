"""Matrix products with weights; selects the fastest library for each.

On a CPU, float32 and bfloat16 weights are packed for oneDNN (reasons in onednn.py), and the plain
matrix is dropped. Exception: a product of a small float32 matrix with a single row uses torch,
which has less overhead per call, so small matrices are kept in both forms. All other products use
torch. The choice depends on shapes only, so the same batch has the same result in every process.

Not here: products of activations with activations (grouped_attention.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backends.engine.torch import native_layers, onednn

# Measured on one core (EPYC, Zen 5), one row: 256 x 704 takes 9 us plain and 18 us packed, 4096 x
# 4096 takes 2.3 ms plain and 1.3 ms packed.
PLAIN_BYTES_MAX = 4 * 1024**2


class Linear:
    """x @ weight.T + bias, for a weight [outputs, inputs]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._packed = onednn.pack(weight) if onednn.serves(weight) else None
        is_small = weight.dtype == torch.float32 and weight.nbytes <= PLAIN_BYTES_MAX
        is_plain_used = self._packed is None or is_small
        self._plain = weight if is_plain_used else None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        plain = self._plain
        if plain is not None and (self._packed is None or len(inputs) == 1):
            return F.linear(inputs, plain, self.bias)
        assert self._packed is not None
        return onednn.product(inputs, self._packed, self.bias)

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """residual + the product. It may change `residual`: use only the result."""
        plain = self._plain
        if plain is not None and (self._packed is None or len(inputs) == 1):
            if self.bias is not None:
                residual = residual + self.bias
            return residual.addmm_(inputs, plain.t())
        assert self._packed is not None
        return onednn.product_plus(inputs, self._packed, self.bias, residual)


class GatedLinear:
    """silu(x @ gate.T) * (x @ up.T): the first half of the feed-forward of these models."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.both = Linear(weight, bias)  # gate's rows, then up's

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        both = self.both(inputs)
        if native_layers.serves(both):
            return native_layers.gate_rows(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
