"""Matrix products of float32 rows with bfloat16 weights, summed in float32. CPU with AVX-512 only.

Weights and KV of a bfloat16 model are bfloat16. Everything between two matrices is float32: the
residual stream, norms, heads, gates and logits. oneDNN in torch has no such product: it rounds the
result to bfloat16. Rounded logits alone cause most of a bfloat16 model's error
(`python -m bench.precision`). native.c has two forms of the product:

    exact     float32 times widened bfloat16. Used by default. A sum does not depend on other rows
    rounded   rows rounded to bfloat16, by torch's `brgemm`. Used for ROUNDED_ROWS_MIN rows and more
              on CPUs that multiply bfloat16 faster than float32: with AMX, or by AMD

An Intel CPU without AMX multiplies bfloat16 at half the rate of float32, so the exact form is
faster there. torch's brgemm is not a public interface. It is tested once, and the exact form is
used if it is missing or wrong. It has not run on a CPU with AMX.

KV of the two forms differs by less than rounding KV to bfloat16, so they share a fingerprint.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from backends.engine.torch import native_layers
from mooncake_store.native.library import function

COLUMNS = 64  # outputs in a block of a packed matrix, as in native.c
ROUNDED_ROWS_MIN = 8  # fewer rows take as long as reading the weights, in both forms
TOLERANCE = 1e-4  # of the test of brgemm: both sums are float32
BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] in the layout of native.c."""

    words: torch.Tensor  # bfloat16 [blocks of COLUMNS outputs, inputs / 2, COLUMNS, 2]
    outputs: int


@dataclass(frozen=True, slots=True)
class _Brgemm:
    """Addresses of torch's product of a block, and of the function that ends its use."""

    product: int
    release: int


def activations_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype of everything between the matrices of a model whose weights are `dtype`."""
    float32 = torch.empty(0, dtype=torch.float32, device=device)
    is_mixed = dtype == torch.bfloat16 and native_layers.serves(float32)
    return torch.float32 if is_mixed else dtype


def serves(weight: torch.Tensor) -> bool:
    """Whether `pack` supports this weight [outputs, inputs] on this machine."""
    is_mixed = activations_dtype(weight.dtype, weight.device) != weight.dtype
    return is_mixed and weight.shape[1] % 2 == 0


def pack(weight: torch.Tensor) -> PackedWeight:
    outputs, inputs = weight.shape
    words = weight.new_empty(-(-outputs // COLUMNS), inputs // 2, COLUMNS, 2)
    packed = function("pack_matrix", None, [_POINTER, _INT, _INT, _POINTER])
    assert packed is not None, "ask `serves` first"
    weight = weight.contiguous()
    packed(weight.data_ptr(), outputs, inputs, words.data_ptr())
    return PackedWeight(words, outputs)


def product(
    inputs: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """inputs @ weight.T + bias. inputs [rows, any] and bias [outputs]: float32."""
    out = inputs.new_empty(len(inputs), weight.outputs)
    _multiply(inputs, weight, bias, out, False, _brgemm())
    return out


def add_product(residual: torch.Tensor, inputs: torch.Tensor, weight: PackedWeight) -> None:
    """residual += inputs @ weight.T. residual [rows, outputs]: float32, contiguous."""
    _multiply(inputs, weight, None, residual, True, _brgemm())


def rounds(rows: int) -> bool:
    """Whether products with so many rows use the rounded form on this machine."""
    return rows >= ROUNDED_ROWS_MIN and _brgemm() is not None


def _multiply(
    inputs: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    is_added: bool,
    brgemm: _Brgemm | None,
) -> None:
    rows, width = inputs.shape
    assert inputs.dtype == out.dtype == torch.float32, (inputs.dtype, out.dtype)
    assert inputs.stride(1) == 1 and out.is_contiguous(), (inputs.stride(), out.stride())
    assert width == 2 * weight.words.shape[1] and out.shape == (rows, weight.outputs)
    scratch = None
    if brgemm is not None and rows >= ROUNDED_ROWS_MIN:
        scratch = torch.empty(rows, width, dtype=torch.bfloat16)
    native_layers.multiply_rows(
        inputs,
        weight.words,
        bias,
        out,
        is_added,
        None if scratch is None or brgemm is None else (scratch, brgemm.product, brgemm.release),
    )


@functools.cache
def _brgemm() -> _Brgemm | None:
    """torch's brgemm, if this CPU multiplies bfloat16 faster than float32; None: exact form."""
    # With either variable, torch may have no kernel for it, and would end the process.
    is_limited = any(name in os.environ for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"))
    if is_limited or not torch.backends.mkldnn.is_available():
        return None
    found = _found_brgemm() if _is_bfloat16_faster(_cpu_flags()) else None
    return found if found is not None and _is_right(found) else None


def _is_bfloat16_faster(flags: str) -> bool:
    """`flags`: the lines `vendor_id` and `flags` of /proc/cpuinfo."""
    words = flags.split()
    return "amx_bf16" in words or ("AuthenticAMD" in words and "avx512_bf16" in words)


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return "\n".join(
        next((line for line in lines if line.startswith(name)), "")
        for name in ("vendor_id", "flags")
    )


def _found_brgemm() -> _Brgemm | None:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        addresses = [ctypes.cast(library[name], _POINTER).value for name in (BRGEMM, RELEASE)]
    except (OSError, AttributeError):
        return None  # another version of torch
    product, release = addresses
    return _Brgemm(product, release) if product and release else None


def _is_right(brgemm: _Brgemm) -> bool:
    """Compare the rounded form with torch's product."""
    rows, width = 2 * ROUNDED_ROWS_MIN + 5, 104  # neither is a whole number of AMX tiles
    inputs = torch.linspace(-1, 1, rows * width).view(-1, width)
    weight = torch.linspace(-1, 2, 2 * COLUMNS * width).view(-1, width).bfloat16()
    out = torch.ones(len(inputs), len(weight))
    with torch.inference_mode():
        expected = 1 + inputs.bfloat16().float() @ weight.float().t()
        _multiply(inputs, pack(weight), None, out, True, brgemm)
    return torch.allclose(out, expected, atol=TOLERANCE, rtol=TOLERANCE)
