"""Matrix products with weights; selects the fastest library for each.

On a CPU weights are packed, and the plain matrix is dropped. bfloat16 weights are packed for
products with float32 (mixed_products.py). float32 weights are packed for oneDNN (onednn.py).
Without native code, bfloat16 weights are packed for oneDNN too. Exception: small float32 matrices
are kept in both forms, because torch has less overhead per call for a product with a single row.
Other devices and dtypes use torch. The choice depends on the CPU, dtype and shapes only, so a batch
has the same result in every process of a machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backends.engine.torch import mixed_products, onednn

# Largest matrix that is kept in both forms. One row, one core (EPYC, Zen 5): 256 x 704 takes 9 us
# plain and 18 us packed. 4096 x 4096 takes 2.3 ms plain and 1.3 ms packed.
PLAIN_BYTES_MAX = 4 * 1024**2


class Linear:
    """x @ weight.T + bias, for a weight [outputs, inputs].

    x, the bias and the result are in the dtype of activations (`mixed_products.activations_dtype`).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.dtype = weight.dtype
        self._mixed = mixed_products.pack(weight) if mixed_products.serves(weight) else None
        if self._mixed is not None:
            self._packed = self._plain = None
            return
        if mixed_products.activations_dtype(weight.dtype, weight.device) != weight.dtype:
            weight = weight.float()  # an odd number of inputs
        self._packed = onednn.pack(weight) if onednn.serves(weight) else None
        is_small = weight.dtype == torch.float32 and weight.nbytes <= PLAIN_BYTES_MAX
        self._plain = weight if self._packed is None or is_small else None

    def _packed_for(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """The packed weight; None: the plain weight is faster or the only one."""
        return None if self._plain is not None and len(inputs) == 1 else self._packed

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._mixed is not None:
            return mixed_products.product(inputs, self._mixed, self.bias)
        if (packed := self._packed_for(inputs)) is not None:
            return onednn.product(inputs, packed, self.bias)
        assert self._plain is not None
        return F.linear(inputs, self._plain, self.bias)

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """residual + the product. `residual` may be overwritten, so use only the result."""
        if self._mixed is not None:
            if self.bias is not None:
                residual = residual.add_(self.bias)
            mixed_products.add_product(residual, inputs, self._mixed)
            return residual
        if (packed := self._packed_for(inputs)) is not None:
            return onednn.product_plus(inputs, packed, self.bias, residual)
        assert self._plain is not None
        if self.bias is not None:
            residual = residual + self.bias
        return residual.addmm_(inputs, self._plain.t())
