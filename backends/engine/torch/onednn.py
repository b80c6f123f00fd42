"""Matrix products by oneDNN instead of the BLAS of torch. CPU only.

torch multiplies float32 matrices with MKL. On AMD processors MKL uses only AVX2 and reaches 110
GFLOP/s on one core of an EPYC (Zen 5). oneDNN, which is part of torch, uses AVX-512 and reaches 250
GFLOP/s there. On Intel both are equal. For bfloat16 torch uses oneDNN, but with plain weights. A
packed weight makes a product with one row two and a half times as fast.

torch has no public switch for this. This module calls the operators `mkldnn::_linear_pointwise` of
torch's compiler, which are not a public interface. So the operators are tested once on small
matrices. If they are missing or wrong, torch's public functions are used.
"""

from __future__ import annotations

import functools

import torch

TYPICAL_ROWS = 64  # for which the packing is optimised; products may have any number of rows
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # dtypes to pack; errors in the test


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [outputs, inputs] in an opaque layout that is fastest in oneDNN."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return packed


def product(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """inputs @ weight.T + bias. The weight is packed, contiguous, or a transposed contiguous one.

    A slice of columns is correct too, but a hundred times slower.
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
    """Whether the operators support products of this tensor's device and dtype."""
    return tensor.device.type == "cpu" and tensor.dtype in TOLERANCES and _works(tensor.dtype)


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Test each use of these functions against torch's own product."""
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
