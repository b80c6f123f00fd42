"""The model's tensors, from a GGUF file to model.safetensors in bfloat16.

llama.cpp rotates scalars 2i and 2i + 1 of a Llama's head, and transformers scalars i and i + half.
So files of the architecture `llama` hold the rows of q and k in another order, which is undone
here. Qwen2 is rotated alike in both.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backends.models.gguf_file import GgufFile
from backends.models.progress import Progress
from backends.models.shape import EMBEDDING, HEAD, ROPE_FACTORS, ModelShape

ALIGNMENT_BYTES = 8  # of the data in a safetensors file
BF16_NAN = 0x7FC0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor of the checkpoint is in the GGUF file."""

    name: str
    shape: tuple[int, ...]
    row_order: NDArray[np.intp] | None = None  # see GgufFile.rows


def tensors_of(shape: ModelShape) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by their names in a Hugging Face folder."""
    hidden, inner = shape.hidden, shape.intermediate
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    is_permuted = shape.architecture == "llama"
    q_order = _rotary_order(shape.heads, shape.head_dim) if is_permuted else None
    k_order = _rotary_order(shape.kv_heads, shape.head_dim) if is_permuted else None
    matrices = (
        ("self_attn.q_proj", "attn_q", (q_rows, hidden), q_order),
        ("self_attn.k_proj", "attn_k", (kv_rows, hidden), k_order),
        ("self_attn.v_proj", "attn_v", (kv_rows, hidden), None),
        ("self_attn.o_proj", "attn_output", (hidden, q_rows), None),
        ("mlp.gate_proj", "ffn_gate", (inner, hidden), None),
        ("mlp.up_proj", "ffn_up", (inner, hidden), None),
        ("mlp.down_proj", "ffn_down", (hidden, inner), None),
        ("input_layernorm", "attn_norm", (hidden,), None),
        ("post_attention_layernorm", "ffn_norm", (hidden,), None),
    )
    vocabulary = (shape.vocabulary_tokens, hidden)
    found = {"model.embed_tokens.weight": StoredTensor(EMBEDDING, vocabulary)}
    for layer in range(shape.layers):
        for ours, theirs, size, order in matrices:
            name, stored = f"model.layers.{layer}.{ours}", f"blk.{layer}.{theirs}"
            found[f"{name}.weight"] = StoredTensor(f"{stored}.weight", size, order)
            if shape.architecture == "qwen2" and theirs in ("attn_q", "attn_k", "attn_v"):
                found[f"{name}.bias"] = StoredTensor(f"{stored}.bias", size[:1])
    found["model.norm.weight"] = StoredTensor("output_norm.weight", (hidden,))
    if not shape.has_tied_embeddings:
        found["lm_head.weight"] = StoredTensor(HEAD, vocabulary)
    return found


def _rotary_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """The stored row of each row of a Hugging Face folder: the halves of a head are interleaved."""
    rows = np.arange(heads * head_dim, dtype=np.intp)
    return rows.reshape(heads, head_dim // 2, 2).swapaxes(1, 2).ravel()


def weight_problems(file: GgufFile, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Tensors that are missing, have another shape, or are not part of the model."""
    for tensor in tensors.values():
        stored = file.tensors.get(tensor.name)
        if stored is None:
            yield f"tensor {tensor.name} is missing"
        elif stored.shape != tensor.shape:
            yield f"tensor {tensor.name} is {list(stored.shape)}, must be {list(tensor.shape)}"
    names = {tensor.name for tensor in tensors.values()}
    for name in sorted(file.tensors.keys() - names - {ROPE_FACTORS}):
        yield f"tensor {name} is not part of this architecture, as far as it is supported"


def weights_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Size of the weights in bfloat16."""
    return sum(2 * int(np.prod(tensor.shape)) for tensor in tensors.values())


def write_weights(
    path: Path, file: GgufFile, tensors: Mapping[str, StoredTensor], progress: Progress
) -> None:
    """Write a safetensors file. Holds one stored tensor and a piece of decoded rows in memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * int(np.prod(tensor.shape))
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    written = 0
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for values in file.rows(tensor.name, tensor.row_order):
                written += out.write(bfloat16(values).tobytes())
            progress("convert to bfloat16", written / end)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), BF16_NAN, rounded).astype("<u2")
