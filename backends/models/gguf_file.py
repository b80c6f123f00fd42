"""Reads the header of a GGUF file, and the rows of its tensors.

A GGUF file consists of a header (metadata, then name, shape, type and offset of each tensor) and
the data. Every length is checked against the size of the file before it is used, so a file that is
cut short or damaged is rejected. The reader of the package `gguf` maps the file instead, does not
check lengths, and takes two seconds for a vocabulary of 50,000 tokens. From that package come the
numbers of the format and the decoding of blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from numpy.typing import NDArray

from backends.models.problems import ModelError

VERSIONS = (2, 3)  # version 1 has lengths of 32 bits
DIMENSIONS_MAX = 4  # of a tensor in ggml
DEFAULT_ALIGNMENT_BYTES = 32
CHUNK_SCALARS = 2**22  # scalars that are decoded at once; bounds the memory of a conversion
# Types whose decoding the tests compare with the format's description.
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
TENSOR_TYPES = tuple(gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", *QUANTISED))
SCALARS = {
    gguf.GGUFValueType[name]: np.dtype(dtype)
    for name, dtype in {
        "UINT8": "<u1",
        "INT8": "<i1",
        "UINT16": "<u2",
        "INT16": "<i2",
        "UINT32": "<u4",
        "INT32": "<i4",
        "FLOAT32": "<f4",
        "BOOL": "?",
        "UINT64": "<u8",
        "INT64": "<i8",
        "FLOAT64": "<f8",
    }.items()
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    shape: tuple[int, ...]  # the last dimension is contiguous, as in safetensors
    type_id: int  # of GGMLQuantizationType, or unknown to the package `gguf`
    offset_bytes: int  # from the start of the file

    @property
    def type_name(self) -> str:
        try:
            return gguf.GGMLQuantizationType(self.type_id).name
        except ValueError:
            return f"type {self.type_id}"

    @property
    def is_known(self) -> bool:
        return self.type_id in TENSOR_TYPES

    @property
    def scalars(self) -> int:
        return int(np.prod(self.shape, dtype=object))  # of Python's integers: no overflow

    @property
    def row_bytes(self) -> int:
        """Bytes of the last dimension, of a known type. 0: it is no multiple of a block."""
        block_scalars, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.type_id)]
        blocks, rest = divmod(self.shape[-1], block_scalars)
        return 0 if rest else blocks * block_bytes

    @property
    def size_bytes(self) -> int:
        return self.scalars // self.shape[-1] * self.row_bytes if self.scalars else 0


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    size_bytes: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header. Raises ModelError if the file is no whole GGUF file."""
        try:
            with path.open("rb") as file:
                return _read_header(path, _Cursor(file, path.stat().st_size))
        except OSError as error:
            raise ModelError(str(path), [f"cannot be read: {error.strerror or error}"]) from None
        except _Damaged as damage:
            raise ModelError(str(path), [str(damage)]) from None

    def tensor_problems(self, name: str) -> Iterator[str]:
        tensor = self.tensors[name]
        if not tensor.is_known:
            known = ", ".join(each.name for each in TENSOR_TYPES)
            yield f"tensor {name} has the unsupported type {tensor.type_name}; known: {known}"
        elif not tensor.row_bytes:
            yield f"tensor {name} is damaged: rows of {tensor.shape[-1]} are no whole blocks"
        elif (end := tensor.offset_bytes + tensor.size_bytes) > self.size_bytes:
            yield (
                f"the file is cut short: it has {self.size_bytes} bytes, and tensor {name} ends at "
                f"{end}; copy it again"
            )

    def rows(self, name: str, order: NDArray[np.intp] | None) -> Iterator[NDArray[np.float32]]:
        """The decoded tensor in pieces of whole rows, [rows, columns] each. `order`: which stored
        row comes at each place; None: as stored. Raises ModelError if the file became shorter."""
        tensor = self.tensors[name]
        raw = np.fromfile(
            self.path, dtype=np.uint8, count=tensor.size_bytes, offset=tensor.offset_bytes
        )
        if len(raw) != tensor.size_bytes:
            raise ModelError(str(self.path), ["the file changed while it was read; try again"])
        stored = raw.reshape(-1, tensor.row_bytes)
        step = max(CHUNK_SCALARS // tensor.shape[-1], 1)
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        for start in range(0, len(stored), step):
            rows = slice(start, start + step)
            piece = stored[rows] if order is None else stored[order[rows]]
            yield gguf.dequantize(np.ascontiguousarray(piece), kind)


class _Damaged(Exception):
    """The header cannot be read to its end."""


@dataclass(slots=True)
class _Cursor:
    file: BinaryIO
    left_bytes: int

    def take(self, size_bytes: int) -> bytes:
        if size_bytes > self.left_bytes:
            raise _Damaged("the file is cut short or damaged in its header; copy it again")
        self.left_bytes -= size_bytes
        return self.file.read(size_bytes)

    def integer(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def count(self, least_bytes: int) -> int:
        """A number of items. Each takes `least_bytes` at least, so a damaged number is noticed
        before the items are read."""
        items = self.integer("<Q")
        if items * least_bytes > self.left_bytes:
            raise _Damaged("the file is cut short or damaged in its header; copy it again")
        return items

    def text(self) -> str:
        return self.take(self.integer("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == gguf.GGUFValueType.STRING:
            return self.text()
        if kind in SCALARS:
            return self._scalars(kind, 1)[0]
        if kind == gguf.GGUFValueType.ARRAY:
            inner = self.integer("<I")
            if inner == gguf.GGUFValueType.STRING:
                return [self.text() for _ in range(self.count(8))]
            if inner in SCALARS:
                return self._scalars(inner, self.integer("<Q"))
            kind = inner
        raise _Damaged(f"the metadata holds a value of type {kind}, which is not supported")

    def _scalars(self, kind: int, count: int) -> list[Any]:
        dtype = SCALARS[gguf.GGUFValueType(kind)]
        found: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return found


def _read_header(path: Path, cursor: _Cursor) -> GgufFile:
    file_bytes = cursor.left_bytes
    if file_bytes < 8 or cursor.take(4) != b"GGUF":
        raise _Damaged("this is no GGUF file: it does not begin with `GGUF`")
    version = cursor.integer("<I")
    if version not in VERSIONS:
        kind = "big-endian GGUF" if version & 0xFFFF == 0 else f"GGUF version {version}"
        raise _Damaged(f"{kind} is not supported; known: version 2 and 3, little-endian")
    tensor_count, metadata_count = cursor.count(24), cursor.count(13)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.integer("<I"))
    infos: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        dimensions = cursor.integer("<I")
        if name in infos or not 1 <= dimensions <= DIMENSIONS_MAX:
            raise _Damaged(f"the header is damaged at tensor {name!r}; copy it again")
        shape = tuple(cursor.integer("<Q") for _ in range(dimensions))[::-1]
        infos[name] = GgufTensor(shape, cursor.integer("<I"), cursor.integer("<Q"))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _Damaged(f"general.alignment is {alignment!r}, not a number of bytes")
    header_bytes = file_bytes - cursor.left_bytes
    data_start = -(-header_bytes // alignment) * alignment
    tensors = {
        name: GgufTensor(each.shape, each.type_id, data_start + each.offset_bytes)
        for name, each in infos.items()
    }
    return GgufFile(path, file_bytes, metadata, tensors)
