"""Opens a GGUF file: metadata, and tensors by name.

The package `gguf` parses the file and decodes blocks of quantised weights. Its reader maps the file
and does not check lengths, so this module checks them. A file that is cut short or damaged is
rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from backends.models.catalogue import ModelError

# Types whose decoding the tests compare with the description of the format.
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
)
CHUNK_SCALARS = 2**22  # scalars that are decoded at once; bounds the memory of a conversion


class _CheckedReader(gguf.GGUFReader):
    """Every read of the package goes through `_get`, which raises ValueError past the end."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"the file ends at byte {len(self.data)}, before its content does")
        return super()._get(offset, dtype, count, override_order)


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Raises ModelError if the file cannot be read, or is no whole GGUF file."""
        try:
            reader = _CheckedReader(path)
            metadata = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            reason = str(error) or type(error).__name__
            raise ModelError(
                f"{path} is no GGUF file, or damaged ({reason}); copy it again"
            ) from None
        return cls(path, metadata, {tensor.name: tensor for tensor in reader.tensors})

    def shape(self, name: str) -> tuple[int, ...]:
        """The last dimension is contiguous, as in safetensors."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def type_problems(self) -> Iterator[str]:
        for tensor in self.tensors.values():
            if tensor.tensor_type.name not in TENSOR_TYPES:
                yield (
                    f"tensor {tensor.name} has the unsupported type {tensor.tensor_type.name}; "
                    f"known: {', '.join(TENSOR_TYPES)}"
                )

    def rows(self, name: str, order: NDArray[np.intp] | None = None) -> Iterator[Any]:
        """The decoded tensor in float32, in pieces of whole rows. `order`: which stored row comes
        at each place; None: as stored."""
        tensor = self.tensors[name]
        stored = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
        step = max(CHUNK_SCALARS // int(tensor.shape[0]), 1)
        for start in range(0, len(stored), step):
            chosen = slice(start, start + step)
            piece = stored[chosen] if order is None else stored[order[chosen]]
            yield gguf.dequantize(piece, tensor.tensor_type)
