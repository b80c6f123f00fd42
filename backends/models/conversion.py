"""Converts a GGUF file to a Hugging Face folder with weights in bfloat16.

All problems of a file are found before anything is written. Not here: where the folder is put
(placing.py), and where the file comes from (fetching.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.models.gguf_file import GgufFile
from backends.models.problems import ModelError
from backends.models.progress import Progress
from backends.models.shape import ModelShape, read_shape
from backends.models.vocabulary import Vocabulary, read_vocabulary
from backends.models.weights import StoredTensor, tensors_of, weight_problems, weights_bytes
from backends.models.weights import write_weights as write_safetensors

TOKENIZER_BYTES_MAX = 32 * 2**20  # room for the files beside the weights


@dataclass(frozen=True, slots=True)
class Convertible:
    """A GGUF file without problems."""

    file: GgufFile
    shape: ModelShape
    vocabulary: Vocabulary
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> Convertible:
        """Raises ModelError with all problems of the file."""
        file = GgufFile.open(path)
        shape, found = read_shape(file)
        vocabulary, vocabulary_problems = read_vocabulary(file.metadata)
        found += vocabulary_problems
        tensors = tensors_of(shape) if shape else {}
        if shape:
            found += weight_problems(file, tensors)
        found += [problem for name in file.tensors for problem in file.tensor_problems(name)]
        if (
            vocabulary
            and shape
            and len(file.metadata["tokenizer.ggml.tokens"]) != (shape.vocabulary_tokens)
        ):
            found.append("tokenizer.ggml.tokens and the rows of token_embd.weight differ in number")
        if found or not shape or not vocabulary:
            raise ModelError(str(path), found)
        return cls(file, shape, vocabulary, tensors)

    @property
    def size_bytes(self) -> int:
        """At most so large becomes the folder."""
        return weights_bytes(self.tensors) + TOKENIZER_BYTES_MAX

    def write(self, folder: Path, progress: Progress) -> None:
        """Write the files into an existing folder. Raises OSError, or ModelError if the GGUF file
        changed."""
        bos_id, eos_ids = self.vocabulary.bos_id, list(self.vocabulary.eos_ids)
        special = {"bos_token_id": bos_id, "eos_token_id": eos_ids}
        write_safetensors(folder / "model.safetensors", self.file, self.tensors, progress)
        _write_json(folder / "config.json", self.shape.config_json() | special)
        _write_json(folder / "generation_config.json", special)
        length = {"model_max_length": self.shape.context_tokens_max}
        config = dict(self.vocabulary.config) | length
        _write_json(folder / "tokenizer_config.json", config)
        text = self.vocabulary.tokenizer.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
