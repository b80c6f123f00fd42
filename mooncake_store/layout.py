"""Layout of a KV block, fingerprint of a model's KV, and geometry of slots in a memory segment.

A block is one array [layers, kv_factor, kv_heads, block_tokens, head_dim] in C order. A layer is
one contiguous span, so it can be stored and moved as soon as it is computed. A kv_factor of 2 means
K and V. A kv_factor of 1 means latent attention (MLA): one row per token, from which K and V of all
heads are derived. An engine that computes only some consecutive layers (a pipeline stage) has pages
with these layers only. Even there, block layout and fingerprint describe all layers of the model.

A memory segment is divided into units of one size. It begins with one header per unit. One digest
cell per unit follows, and then the payloads of all units. A slot is as many adjacent units as a
block needs. The header of a block is that of its first unit. The digests of the block's layers fill
the cells of its units, one digest after the other.

Not here: which slot a block gets (directory/core/slots.py), the header's fields (slot_memory.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import NamedTuple

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
HEADER_BYTES = 64  # size of a unit's header: one cache line
STATE_WRITING, STATE_READY = 1, 2  # header states: payload incomplete, payload complete
# Only in the inventory that a node reports, never in a header: a ready block whose header has the
# ephemeral flag.
STATE_EPHEMERAL = 3
DIGEST_BYTES = 8  # xxh3_64 of one layer of a block
DIGEST_FOR_BYTES = 1024  # a unit's cell has room for one digest per this many payload bytes
SLOT_ALIGN_BYTES = 4096  # alignment of the first payload, which O_DIRECT requires


def blocks_touched(tokens: int, block_tokens: int) -> int:
    """The number of blocks for these tokens; the last one may be partly filled."""
    assert tokens >= 0 and block_tokens > 0, (tokens, block_tokens)
    return (tokens + block_tokens - 1) // block_tokens


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV layout of an engine. Two engines exchange blocks only if all fields are equal."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # "float32" | "bfloat16" | "float16" | "fp8"
    block_tokens: int
    kv_factor: int = 2  # 2: K and V; 1: one row [head_dim] per token for all heads (MLA)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ValueError(f"KV dtype {self.dtype!r} is not supported; use one of {known}")
        if min(self.layers, self.kv_heads, self.head_dim, self.block_tokens) <= 0:
            raise ValueError(f"every dimension of a KV layout must be positive: {self}")
        if self.kv_factor not in (1, 2) or (self.kv_factor == 1 and self.kv_heads != 1):
            raise ValueError(f"kv_factor must be 2, or 1 with one kv_head: {self}")

    @property
    def rows(self) -> int:
        """Rows of head_dim scalars per token and layer: K and V heads, or the latent row."""
        return self.kv_factor * self.kv_heads

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        scalars = self.rows * self.block_tokens * self.head_dim
        return scalars * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens

    def layer_offset_bytes(self, layer: int) -> int:
        """Offset of this layer inside a block."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        return layer * self.layer_bytes


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Consecutive layers of a model: [first, stop)."""

    first: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise ValueError(f"layers [{self.first}, {self.stop}) are no range")

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def indices(self) -> range:
        return range(self.first, self.stop)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Layout of an engine's page: some consecutive layers of one block, usually all."""

    block: KvLayout
    layers: LayerRange

    def __post_init__(self) -> None:
        if self.layers.stop > self.block.layers:
            raise ValueError(f"{self.layers} exceeds a model of {self.block.layers} layers")

    @classmethod
    def whole(cls, block: KvLayout) -> PageLayout:
        return cls(block, LayerRange(0, block.layers))

    @property
    def is_whole(self) -> bool:
        return len(self.layers) == self.block.layers

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.block.layer_bytes

    def page_offset_bytes(self, page: int) -> int:
        """Offset of this page in the pool of its engine."""
        return page * self.page_bytes

    def layer_offset_bytes(self, layer: int) -> int:
        """Offset of this layer of the model inside a page."""
        assert layer in self.layers.indices, f"layer {layer} of pages with {self.layers}"
        return (layer - self.layers.first) * self.block.layer_bytes


def describe(model_id: str, weights_id: str, layout: KvLayout, tp_shape: str = "tp1") -> str:
    """The fields of a fingerprint in readable form: `name=value; name=value`."""
    models = {"model_id": model_id, "weights_id": weights_id}
    values = {**models, **asdict(layout), "tp_shape": tp_shape}
    return "; ".join(f"{name}={_escaped(str(value))}" for name, value in values.items())


def fingerprint(model_id: str, weights_id: str, layout: KvLayout, tp_shape: str = "tp1") -> str:
    """32 hex digits, equal for two workers if and only if each can use the KV of the other."""
    text = describe(model_id, weights_id, layout, tp_shape)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"mooncake.print").hexdigest()


def describe_difference(ours: str, theirs: str) -> str:
    """The fields in which two descriptions differ, for an error message."""
    our_fields, their_fields = _parsed(ours), _parsed(theirs)
    different = [
        f"{name} is {our_fields.get(name, 'not given')}, theirs is "
        f"{their_fields.get(name, 'not given')}"
        for name in dict.fromkeys([*our_fields, *their_fields])
        if our_fields.get(name) != their_fields.get(name)
    ]
    return ", and ".join(different) or "the descriptions are equal, the fingerprints are not"


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace(";", "%3B").replace("=", "%3D")


def _parsed(description: str) -> dict[str, str]:
    parts = (part.partition("=") for part in description.split("; ") if part)
    return {name: value for name, _, value in parts}


class Geometry(NamedTuple):
    """Offsets in a segment or SSD file of `units` units. The number of a slot is the number of its
    first unit. An SSD file has neither headers nor digest cells, because its manifest lists the
    blocks."""

    unit_bytes: int
    units: int
    payload_offset_bytes: int  # offset of the payload of unit 0; 0 for an SSD file

    def header_offset_bytes(self, slot: int) -> int:
        assert 0 <= slot < self.units, f"slot {slot} of {self.units} units"
        return slot * HEADER_BYTES

    def headers(self, slot: int, size_bytes: int) -> slice:
        """The span of the headers of this slot's units; the block's header is the first of them."""
        start = self.header_offset_bytes(slot)
        return slice(start, start + max(1, -(-size_bytes // self.unit_bytes)) * HEADER_BYTES)

    def digests(self, slot: int, size_bytes: int, layers: int) -> slice | None:
        """The span of the block's digests; None if `layers` is 0 or the cells are too small."""
        cell_bytes = _digest_cell_bytes(self.unit_bytes)
        start = self.units * HEADER_BYTES + slot * cell_bytes
        room_bytes = max(1, -(-size_bytes // self.unit_bytes)) * cell_bytes
        stop = start + layers * DIGEST_BYTES
        return slice(start, stop) if 0 < layers * DIGEST_BYTES <= room_bytes else None

    def slot_offset_bytes(self, slot: int) -> int:
        """Offset of the payload of this slot in the segment."""
        assert 0 <= slot < self.units, f"slot {slot} of {self.units} units"
        return self.payload_offset_bytes + slot * self.unit_bytes

    def holds(self, slot: int, size_bytes: int) -> bool:
        """True if a block of this size in this slot lies inside the segment or file."""
        return slot >= 0 and slot * self.unit_bytes + size_bytes <= self.units * self.unit_bytes


def _aligned(size_bytes: int) -> int:
    return (size_bytes + SLOT_ALIGN_BYTES - 1) // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES


def _digest_cell_bytes(unit_bytes: int) -> int:
    """Bytes of the digest cell of a unit: one digest per KiB, but at least a cache line."""
    return max(HEADER_BYTES, unit_bytes // DIGEST_FOR_BYTES * DIGEST_BYTES)


def geometry(memory_bytes: int, unit_bytes: int, has_headers: bool = True) -> Geometry:
    """The geometry with the most units that fit into `memory_bytes`, possibly 0."""
    assert memory_bytes >= 0 and unit_bytes > 0, (memory_bytes, unit_bytes)
    if not has_headers:
        return Geometry(unit_bytes, memory_bytes // unit_bytes, 0)
    beside_bytes = HEADER_BYTES + _digest_cell_bytes(unit_bytes)
    units = memory_bytes // (unit_bytes + beside_bytes)
    while units and _aligned(units * beside_bytes) + units * unit_bytes > memory_bytes:
        units -= 1
    return Geometry(unit_bytes, units, _aligned(units * beside_bytes))


def memory_bytes_for(blocks: int, block_bytes: int, unit_bytes: int) -> int:
    """Bytes of the smallest segment in which so many blocks of this size fit."""
    units = blocks * max(1, -(-block_bytes // unit_bytes))
    beside_bytes = HEADER_BYTES + _digest_cell_bytes(unit_bytes)
    return _aligned(units * beside_bytes) + units * unit_bytes
