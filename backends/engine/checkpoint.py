"""Finds, checks and identifies the tensors of a Hugging Face folder. Does not import torch.

A safetensors file consists of eight bytes (length of the header), a JSON header (name -> dtype,
shape, range of bytes) and the data. Files are read and never memory-mapped, because a truncated
mapped file would cause a SIGBUS while the engine serves.

`weights_id` is a hash of the config and of every tensor's name, dtype, shape and content. Of a
checkpoint larger than HASHED_BYTES_MAX, only evenly spaced samples of each large tensor are hashed.
Training and merging change whole tensors and thus the hash; a change between the samples does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.engine.model_config import CheckpointError, read_json

SCALAR_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
HEADER_BYTES_MAX = 100_000_000  # limit of the safetensors format
HASHED_BYTES_MAX = 256 * 1024**2  # largest checkpoint whose tensors are hashed completely
SAMPLES_PER_TENSOR = 16  # number of samples of a tensor that is not hashed completely
SAMPLE_BYTES = 4096  # size of one sample

COMPUTED_SUFFIX = "rotary_emb.inv_freq"  # RoPE frequencies of old checkpoints; not read
OWN_PREFIXES = ("model.", "lm_head.")  # name prefixes of the model's tensors
INDEX_NAME = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
SINGLE_NAME = "model.safetensors"
Names = tuple[str, ...]
Shapes = Mapping[str, tuple[int, ...]]  # tensor -> shape


@dataclass(frozen=True, slots=True)
class TensorEntry:
    path: Path
    dtype: str  # as in the header; the engine accepts only the keys of SCALAR_BYTES
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the file to the tensor's data
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder; create it with `Checkpoint.open`."""

    folder: Path
    entries: Mapping[str, TensorEntry]
    # Data that is not read: "NAME in FILE" for a second copy of a tensor, "all of FILE" for a file.
    stale: Sequence[str] = ()

    @classmethod
    def open(cls, checkpoint_dir: str | Path) -> Checkpoint:
        """Read the headers of all files. Raises a CheckpointError with all problems."""
        folder = Path(checkpoint_dir)
        found: list[str] = []
        weight_map = _weight_map(folder, found)
        names = _file_names(folder, weight_map, found)
        headers = {name: _read_header(folder / name, found) for name in names}
        entries, stale = _chosen(headers, weight_map, found)
        others = sorted(path.name for path in folder.glob(SHARDS) if path.name not in names)
        stale += [f"all of {name}" for name in others]
        if not entries and not found:
            found.append("the safetensors files hold no tensors")
        if found:
            raise CheckpointError(folder, found)
        return cls(folder, entries, stale)

    def problems(
        self, shapes: Shapes, optional_suffixes: Names = (), optional_prefixes: Names = ()
    ) -> list[str]:
        """Tensors that are missing, have a wrong shape or dtype, or are not in `shapes`.

        A tensor that is not in `shapes` is a problem only if its name begins with one of
        OWN_PREFIXES and is not optional. Examples are an extra bias and an extra layer.
        """
        found = []
        for name, shape in shapes.items():
            entry = self.entries.get(name)
            if entry is None:
                found.append(f"tensor {name} is missing; config.json asks for {list(shape)}")
            elif entry.shape != shape:
                found.append(
                    f"tensor {name} is {list(entry.shape)}; config.json asks for {list(shape)}"
                )
            elif entry.dtype not in SCALAR_BYTES:
                known = ", ".join(SCALAR_BYTES)
                found.append(f"tensor {name} is {entry.dtype}; the engine reads {known}")
        for name in self.others(shapes, optional_suffixes, optional_prefixes):
            if name.startswith(OWN_PREFIXES):
                found.append(f"tensor {name} is not part of the model in config.json")
        return found

    def others(
        self, shapes: Shapes, optional_suffixes: Names = (), optional_prefixes: Names = ()
    ) -> list[str]:
        """Sorted names of tensors that are neither in `shapes` nor optional nor COMPUTED_SUFFIX."""
        known = (COMPUTED_SUFFIX, *optional_suffixes)
        return [
            name
            for name in sorted(self.entries.keys() - shapes.keys())
            if not name.endswith(known) and not name.startswith(optional_prefixes)
        ]

    def read(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor. Its dtype and shape are in `entries`. Raises CheckpointError if
        the file has become shorter."""
        entry = self.entries[name]
        raw = np.fromfile(
            entry.path, dtype=np.uint8, count=entry.size_bytes, offset=entry.offset_bytes
        )
        if len(raw) != entry.size_bytes:
            raise CheckpointError(self.folder, [f"{entry.path.name} changed while it was read"])
        return raw

    def weights_id(self, config: object) -> str:
        """Hash of the weights and of `repr(config)`: 32 hex digits."""
        digest = hashlib.blake2b(repr(config).encode(), digest_size=16, person=b"mooncake.weigh")
        total_bytes = sum(entry.size_bytes for entry in self.entries.values())
        is_whole = total_bytes <= HASHED_BYTES_MAX
        paths = {entry.path for entry in self.entries.values()}
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in paths}
            for name, entry in sorted(self.entries.items()):
                digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
                for start, size_bytes in _samples(entry.size_bytes, is_whole):
                    files[entry.path].seek(entry.offset_bytes + start)
                    digest.update(files[entry.path].read(size_bytes))
        return digest.hexdigest()


def _samples(size_bytes: int, is_whole: bool) -> list[tuple[int, int]]:
    """(start, length) in bytes of each hashed part of a tensor."""
    if is_whole or size_bytes <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        return [(0, size_bytes)]
    last = size_bytes - SAMPLE_BYTES
    steps = SAMPLES_PER_TENSOR - 1
    return [(last * index // steps, SAMPLE_BYTES) for index in range(SAMPLES_PER_TENSOR)]


def _weight_map(folder: Path, found: list[str]) -> dict[str, str] | None:
    """Tensor -> file, as in the index; None: there is no index. If the index is invalid, returns {}
    and appends the problem to `found`."""
    if not (folder / INDEX_NAME).exists():
        return None
    index = read_json(folder / INDEX_NAME, found)
    if index is None:
        return {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found.append(f"{INDEX_NAME} has no weight_map; copy it again")
        return {}
    return {name: str(file) for name, file in weight_map.items()}


def _file_names(folder: Path, weight_map: Mapping[str, str] | None, found: list[str]) -> list[str]:
    """The existing files to read: those that the index names, or SINGLE_NAME without an index."""
    if not folder.is_dir():
        found.append("there is no such folder")
        return []
    is_single = (folder / SINGLE_NAME).is_file()
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        if is_single and names and SINGLE_NAME not in names:
            found.append(
                f"{SINGLE_NAME} is in the folder, but {INDEX_NAME} does not name it, and other "
                "readers may use either of them; remove the wrong one"
            )
        missing = [name for name in names if not (folder / name).is_file()]
        found += [f"shard {name} is missing; copy it next to {INDEX_NAME}" for name in missing]
        return [name for name in names if name not in missing]
    if is_single:
        return [SINGLE_NAME]
    found.append(
        f"neither {SINGLE_NAME} nor {INDEX_NAME} is there; other formats (pytorch_model.bin, "
        "GGUF) must be converted with save_pretrained"
    )
    return []


def _chosen(
    headers: Mapping[str, Mapping[str, TensorEntry]],
    weight_map: Mapping[str, str] | None,
    found: list[str],
) -> tuple[dict[str, TensorEntry], list[str]]:
    """(tensor -> entry in the file that the index names; texts for `Checkpoint.stale`).

    A tensor that the index does not name is accepted if only one file has it.
    """
    files: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header:
            files.setdefault(name, []).append(file)
    entries: dict[str, TensorEntry] = {}
    stale: list[str] = []
    for name, holders in files.items():
        file = (weight_map or {}).get(name, holders[0])
        if name not in (weight_map or {}) and len(holders) > 1:
            found.append(f"tensor {name} is in {' and '.join(holders)}, but not in the index")
        elif file not in holders:
            if file in headers:
                found.append(f"tensor {name} is in {holders[0]}, but the index names {file}")
        else:
            entries[name] = headers[file][name]
            stale += [f"{name} in {other}" for other in holders if other != file]
    return entries, stale


def _read_header(path: Path, found: list[str]) -> dict[str, TensorEntry]:
    """The tensors of one file. On failure returns {} and appends the problem to `found`."""
    try:
        file_bytes = os.path.getsize(path)
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(HEADER_BYTES_MAX, file_bytes - 8):
                found.append(f"{path.name} is damaged or cut short: it has no whole header")
                return {}
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        entries = {name: _entry(path, header[name], 8 + header_bytes) for name in header}
        end = max((entry.offset_bytes + entry.size_bytes for entry in entries.values()), default=0)
        if end <= file_bytes:
            return entries
        problem = f"is cut short: it has {file_bytes} bytes and needs {end}; copy it again"
    except OSError as error:
        problem = f"cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is damaged: its header is invalid ({error})"
    found.append(f"{path.name} {problem}")
    return {}


def _entry(path: Path, value: dict[str, Any], data_start: int) -> TensorEntry:
    begin, end = value["data_offsets"]
    shape = tuple(int(size) for size in value["shape"])
    dtype = str(value["dtype"])
    if not 0 <= begin <= end:
        raise ValueError(f"range {begin}..{end}")
    if dtype in SCALAR_BYTES and end - begin != math.prod(shape) * SCALAR_BYTES[dtype]:
        raise ValueError(f"{end - begin} bytes for {dtype} {list(shape)}")
    return TensorEntry(path, dtype, shape, data_start + begin, end - begin)
