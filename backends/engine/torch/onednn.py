"""Matrix products by oneDNN instead of the BLAS of torch. CPU only.

torch multiplies float32 matrices with MKL, which uses only AVX2 on AMD processors: 110 GFLOP/s on
one core of an EPYC (Zen 5). oneDNN, which is part of torch, has 250 GFLOP/s there with AVX-512. On
Intel both are equal. torch uses oneDNN for bfloat16, but with plain weights: a packed weight is two
and a half times as fast in a product with one row.

torch has no public switch, but its compiler's operators can be called:
`mkldnn::_linear_pointwise`, with a packed or a plain weight. They are not a public interface. So
they are tested once on small matrices. If they are missing or wrong, torch's public functions are
used.
"""

from __future__ import annotations

import functools

import torch

TYPICAL_ROWS = 64  # a hint for the packing; products may have any number of rows
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # of the test, for each packed dtype


def pack(weight: torch.Tensor) -> torch.Tensor:
    """An opaque copy of a weight [outputs, inputs] in the layout that is fastest in oneDNN."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return packed


def product(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """inputs @ weight.T + bias. The weight is packed, contiguous, or contiguous transposed.

    A slice of columns would be correct too, but a hundred times slower.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


def product_plus(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, addend: torch.Tensor
) -> torch.Tensor:
    """inputs @ weight.T + bias + addend, in one pass over the result."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        inputs, addend, weight, bias, "add"
    )
    return result


def serves(tensor: torch.Tensor) -> bool:
    """The operators support products with this tensor."""
    return tensor.device.type == "cpu" and tensor.dtype in TOLERANCES and _works(tensor.dtype)


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Test each function in each way that it is used, against torch's own product."""
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
        return False  # another version of torch, or a CPU without this dtype
    tolerance = TOLERANCES[dtype]
    return all(
        torch.allclose(ours.float(), theirs, atol=tolerance, rtol=tolerance)
        for ours, theirs in tried
    )
