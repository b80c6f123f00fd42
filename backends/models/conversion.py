"""Converts a GGUF file to a Hugging Face folder with weights in bfloat16.

All problems of a file are found before a file is written. Not here: the folder's place
(placing.py), the download (fetching.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.models.architecture import StoredTensor, read_config, tensor_problems, tensors_of
from backends.models.catalogue import ModelError
from backends.models.gguf_file import GgufFile
from backends.models.progress import Progress
from backends.models.vocabulary import Vocabulary, read_vocabulary

OTHER_FILES_BYTES = 32 * 2**20  # at most so much beside the weights
BF16_NAN = 0x7FC0


@dataclass(frozen=True, slots=True)
class Conversion:
    """A GGUF file without problems, and its checkpoint."""

    file: GgufFile
    config: Mapping[str, Any]  # content of config.json
    vocabulary: Vocabulary
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> Conversion:
        """Raises ModelError with all problems of the file."""
        file = GgufFile.open(path)
        config, found = read_config(file)
        vocabulary, of_vocabulary = read_vocabulary(file.metadata, config.get("vocab_size"))
        tensors = tensors_of(config) if config else {}
        found += [*of_vocabulary, *file.type_problems()]
        found += tensor_problems(file, tensors) if config else []
        if found or vocabulary is None:
            raise ModelError("\n  - ".join((f"{path} cannot be converted:", *found)))
        return cls(file, {**config, **vocabulary.special_ids}, vocabulary, tensors)

    @property
    def size_bytes(self) -> int:
        """Upper limit of the folder's size."""
        return sum(each.size_bytes for each in self.tensors.values()) + OTHER_FILES_BYTES

    def write(self, folder: Path, progress: Progress) -> None:
        """Write the files into an existing folder. Raises OSError."""
        self._write_weights(folder / "model.safetensors", progress)
        length = {"model_max_length": self.config["max_position_embeddings"]}
        contents = {
            "config.json": self.config,
            "generation_config.json": self.vocabulary.special_ids,
            "tokenizer_config.json": {**self.vocabulary.config, **length},
            "tokenizer.json": json.loads(self.vocabulary.tokenizer.to_str()),
        }
        for name, content in contents.items():
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")

    def _write_weights(self, path: Path, progress: Progress) -> None:
        """Write a safetensors file, with a few decoded rows in memory at a time."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in self.tensors.items():
            start, end = end, end + tensor.size_bytes
            header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the data is aligned to 8 bytes
        written = 0
        with path.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for tensor in self.tensors.values():
                for values in self.file.rows(tensor.name, tensor.row_order):
                    written += out.write(bfloat16(values).tobytes())
                progress("convert to bfloat16", written / end)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), BF16_NAN, rounded).astype("<u2")
