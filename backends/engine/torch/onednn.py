"""Matrix products by oneDNN instead of the BLAS that torch was built with. CPU.

torch multiplies float32 matrices with MKL, which on AMD processors keeps to AVX2: on an EPYC
(Zen 5) 110 GFLOP/s of one core where oneDNN, which torch also carries, does 250 with AVX-512. On
Intel both are alike. bfloat16 goes to oneDNN anyway, but in the order of the checkpoint: a packed
weight streams two and a half times as fast through a product with one row. torch has no public
switch, but the operators that its compiler emits can be called: `mkldnn::_linear_pointwise`, with a
weight packed once or a plain one.

They are not a public interface. So they are tried once on small matrices, and wherever they are
missing or wrong the engine uses torch's public functions. Not here: who uses them (linear.py,
causal_attention.py).
"""

from __future__ import annotations

import functools

import torch

TYPICAL_ROWS = 64  # a hint for the packing; any number of rows works
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # of the dtypes that are packed


def pack(weight: torch.Tensor) -> torch.Tensor:
    """An opaque copy of a weight [outputs, inputs] in the order that oneDNN likes best."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return packed


def product(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """inputs @ weight.T + bias. The weight is packed, contiguous, or contiguous transposed:

    a slice of columns would be right too, but a hundred times slower.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


def product_plus(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor,
) -> torch.Tensor:
    """inputs @ weight.T + bias + addend, in one pass over the result."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        inputs, addend, weight, bias, "add"
    )
    return result


def serves(tensor: torch.Tensor) -> bool:
    """These operators may be used for products with this tensor."""
    return tensor.device.type == "cpu" and tensor.dtype in TOLERANCES and _works(tensor.dtype)


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Try each function in each way that it is used, against torch's own product."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    inputs = torch.linspace(-1, 1, 5 * 24).view(5, 24).to(dtype)
    weight = torch.linspace(-1, 2, 40 * 24).view(40, 24).to(dtype)
    bias = torch.linspace(0, 1, 40).to(dtype)
    addend = torch.linspace(0, 3, 5 * 40).view(5, 40).to(dtype)
    expected = inputs.float() @ weight.float().t()
    try:
        with torch.inference_mode():
            tried = [
                (product(inputs, pack(weight), bias), expected + bias),
                (product(inputs, weight), expected),
                (product(inputs, weight.t().contiguous().t()), expected),
                (product_plus(inputs, pack(weight), bias, addend), expected + bias + addend),
            ]
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False  # another version of torch, or a CPU without this dtype: torch's own will do
    tolerance = TOLERANCES[dtype]
    return all(
        torch.allclose(ours.float(), theirs, atol=tolerance, rtol=tolerance)
        for ours, theirs in tried
    )
