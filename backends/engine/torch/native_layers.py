"""Fused CPU kernels (native.c) for the parts of a layer between its matrix products.

    norm_rows, gate_rows   RMS norm; silu(gate) * up
    rotate_rows            rotary embedding; writes K and V into their pages
    attend_query_tokens    attention of the last token of each sequence; reads the pages in place
    attend_prefill         attention of a prompt's chunk over KV in bfloat16 or fp8
    multiply_rows          products with bfloat16 weights (mixed_products.py)

Each kernel makes one pass over memory. torch needs several operations and gathers the pages. At
batch 16 and 4,096 tokens of context, gathering moved three times the bytes of the KV. The kernels
run on the threads of torch's OpenMP (`GOMP_parallel`), so no second thread pool needs the cores.
Inputs and results are float32. Pages may be float32, bfloat16 or fp8. Without AVX-512 or a
compiler, and for other devices and dtypes, torch is used.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.torch.step_plan import PagesSeen, rounded_up
from mooncake_store.native.library import NativeFunction, function, quick_function

HEAD_DIM_MAX = 128
PREFILL_SHARED_MAX, PREFILL_TILE_TOKENS = 96, 64  # ROWS_MAX and KEYS of native.c
SHARED_SCALARS_MIN = 64 * 1024  # smaller jobs are faster in one thread than in several

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


def _structure(fields: str) -> type[ctypes.Structure]:
    """A structure of native.c. In `fields`, `x` is an int64, `*x` a pointer, `.x` a float."""
    kinds = {"*": _POINTER, ".": _FLOAT}

    class Job(ctypes.Structure):
        _fields_ = [(name.lstrip("*."), kinds.get(name[0], _INT)) for name in fields.split()]

    return Job


_RowsJob = _structure("next rows width row_stride out_stride *source *weight *out .epsilon")
_RotateJob = _structure(
    "next rows heads kv_heads head_dim row_stride *qkv *table *positions *norm *memory *token_rows"
    " tokens memory_is .epsilon"
)
_AttendJob = _structure(
    "next sequences kv_heads shared head_dim block_tokens page_stride *memory *pages *page_starts"
    " *contexts *queries query_stride *out memory_is .scale"
)
_PrefillJob = _structure(
    "next tokens start heads kv_heads head_dim block_tokens page_stride *memory *pages *queries"
    " query_stride *out *packed_keys *packed_values memory_is is_rounded .scale"
)
_ProductJob = _structure(
    "next rows inputs outputs row_stride *source *weight *bias *out is_added *rounded *brgemm"
    " *release"
)


def serves(tensor: torch.Tensor) -> bool:
    """Whether the kernels support this tensor's device and dtype on this machine."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and _has_vectors()


def serves_prefill(queries: torch.Tensor, shared: int, head_dim: int) -> bool:
    """Whether `attend_prefill` supports such queries, with `shared` query heads per KV head."""
    return head_dim in (64, 128) and shared <= PREFILL_SHARED_MAX and serves(queries)


@functools.cache
def _has_vectors() -> bool:
    """Whether the kernels were compiled, which need AVX-512."""
    found = function("engine_vectors", ctypes.c_int, [])
    return found is not None and bool(found())


def norm_rows(
    values: torch.Tensor, epsilon: float, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """RMS norm of values [rows, width], times a weight [width]."""
    return _each_row("norm_rows", values, values.shape[1], epsilon, weight)


def gate_rows(both: torch.Tensor) -> torch.Tensor:
    """both [rows, 2 * width], gate then up -> silu(gate) * up [rows, width]."""
    return _each_row("gate_rows", both, both.shape[1] // 2)


def _each_row(
    name: str,
    source: torch.Tensor,
    width: int,
    epsilon: float = 0.0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """source [rows, any] -> a new tensor [rows, width]."""
    rows = len(source)
    assert source.stride(1) == 1, source.stride()
    out = source.new_empty(rows, width)
    job = _RowsJob(
        0,
        rows,
        width,
        source.stride(0),
        width,
        source.data_ptr(),
        None if weight is None else weight.data_ptr(),
        out.data_ptr(),
        epsilon,
    )
    _run(name, job, rows * width)
    return out


def rotate_rows(
    qkv: torch.Tensor,
    heads: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    norm: torch.Tensor | None,
    epsilon: float,
    memory: torch.Tensor,
    token_rows: torch.Tensor,
) -> None:
    """Norm and rotate q and k of qkv [rows, q heads + k heads + v heads, head_dim] in place.

    Then write K and V to `memory` [any, head_dim], in the rows `token_rows` [tokens, 2 * kv_heads].
    Rows of qkv beyond `tokens` are padding. `norm` None: no norm.
    """
    rows, all_heads, head_dim = qkv.shape
    kv_heads = (all_heads - heads) // 2
    assert qkv.is_contiguous(), qkv.stride()
    job = _RotateJob(
        0,
        rows,
        heads,
        kv_heads,
        head_dim,
        all_heads * head_dim,
        qkv.data_ptr(),
        table.data_ptr(),
        positions.data_ptr(),
        None if norm is None else norm.data_ptr(),
        memory.data_ptr(),
        token_rows.data_ptr(),
        len(token_rows),
        _kind(memory),
        epsilon,
    )
    _run("rotate_rows", job, qkv.numel())


def attend_query_tokens(
    queries: torch.Tensor, memory: torch.Tensor, seen: PagesSeen, block_tokens: int
) -> torch.Tensor:
    """queries [sequences, heads, head_dim] -> [sequences, heads * head_dim].

    memory [pages, 2, kv_heads, block_tokens, head_dim]: KV of one layer. Query i attends to the
    whole context of sequence i of `seen`. `seen` may have more sequences than there are queries.
    """
    sequences, heads, head_dim = queries.shape
    kv_heads = memory.shape[2]
    assert queries.stride()[1:] == (head_dim, 1), queries.stride()
    assert memory[0].is_contiguous() and sequences <= len(seen.contexts)
    out = queries.new_empty(sequences, heads * head_dim)
    job = _AttendJob(
        0,
        sequences,
        kv_heads,
        heads // kv_heads,
        head_dim,
        block_tokens,
        memory.stride(0),
        memory.data_ptr(),
        seen.pages.ctypes.data,
        seen.starts.ctypes.data,
        seen.contexts.ctypes.data,
        queries.data_ptr(),
        queries.stride(0),
        out.data_ptr(),
        _kind(memory),
        head_dim**-0.5,
    )
    _run("attend_last_tokens", job, 2 * seen.tokens * kv_heads * head_dim)
    return out


def attend_prefill(
    queries: torch.Tensor,
    memory: torch.Tensor,
    pages: NDArray[np.int64],
    start: int,
    out: torch.Tensor,
    scratch: torch.Tensor,
    is_rounded: bool,
) -> None:
    """queries [tokens, heads, head_dim] of one sequence, from token `start` on -> out, same size.

    memory [pages, 2, kv_heads, block_tokens, head_dim]: KV of one layer.

    scratch: bfloat16, contiguous, with at least `prefill_scratch` scalars.

    is_rounded: round queries, and the weights of V, to bfloat16. Some CPUs are faster with it.
    """
    tokens, heads, head_dim = queries.shape
    _, _, kv_heads, block_tokens, _ = memory.shape
    need = prefill_scratch(start + tokens, kv_heads, head_dim)
    assert queries.stride()[1:] == (head_dim, 1) and out.is_contiguous()
    assert memory[0].is_contiguous() and scratch.numel() >= need, (scratch.numel(), need)
    job = _PrefillJob(
        0,
        tokens,
        start,
        heads,
        kv_heads,
        head_dim,
        block_tokens,
        memory.stride(0),
        memory.data_ptr(),
        pages.ctypes.data,
        queries.data_ptr(),
        queries.stride(0),
        out.data_ptr(),
        scratch.data_ptr(),
        scratch.data_ptr() + need // 2 * scratch.element_size(),
        _kind(memory),
        is_rounded,
        head_dim**-0.5,
    )
    _run("pack_prefill", job, need)
    job.next = 0
    _run("attend_prefill", job, tokens * need)


def prefill_scratch(context_tokens: int, kv_heads: int, head_dim: int) -> int:
    """Scalars of the scratch memory into which `attend_prefill` packs K and V."""
    return 2 * kv_heads * rounded_up(context_tokens, PREFILL_TILE_TOKENS) * head_dim


def multiply_rows(
    inputs: torch.Tensor,
    words: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    is_added: bool,
    rounded: tuple[torch.Tensor, int, int] | None,
) -> None:
    """out = (or +=) inputs @ weight.T + bias; the arguments of mixed_products.py.

    words: the packed weight. rounded: None, or scratch for inputs in bfloat16, and the addresses of
    brgemm and of the function that ends its use.
    """
    rows, width = inputs.shape
    scratch, brgemm, release = rounded or (None, None, None)
    job = _ProductJob(
        0,
        rows,
        width,
        out.shape[1],
        inputs.stride(0),
        inputs.data_ptr(),
        words.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        is_added,
        None if scratch is None else scratch.data_ptr(),
        brgemm,
        release,
    )
    if scratch is not None:
        _run("round_rows", job, scratch.numel())
        job.next = 0
    _run("multiply_rows", job, rows * words.numel())


def _kind(memory: torch.Tensor) -> int:
    """Number of the pages' dtype in native.c: IS_FLOAT32, IS_BF16, IS_FP8."""
    return {4: 0, 2: 1, 1: 2}[memory.element_size()]


def _run(name: str, job: ctypes.Structure, scalars: int) -> None:
    """Run a small job in this thread with the GIL held, a larger one on torch's threads without."""
    quick, releasing, address = _native(name)
    if scalars < SHARED_SCALARS_MIN:
        quick(ctypes.byref(job))
        return
    threads, parallel = torch.get_num_threads(), _parallel()
    if threads > 1 and parallel is not None:
        parallel(address, ctypes.byref(job), threads, 0)
    else:
        releasing(ctypes.byref(job))


@functools.cache
def _native(name: str) -> tuple[NativeFunction, NativeFunction, int]:
    """A function of native.c: (call that keeps the GIL, call that releases it, address)."""
    quick, found = quick_function(name, None, [_POINTER]), function(name, None, [_POINTER])
    assert quick is not None and found is not None, "ask `serves` first"
    return quick, found, ctypes.cast(found, _POINTER).value or 0  # type: ignore[arg-type]


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """`GOMP_parallel` of the OpenMP library in this process; None: the library has none."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.restype, found.argtypes = None, [_POINTER, _POINTER, ctypes.c_uint, ctypes.c_uint]
    return found
