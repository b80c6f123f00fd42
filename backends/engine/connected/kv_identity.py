"""What of a checkpoint's files is in the fingerprint, beside the weights.

Engines may exchange blocks only if the same tokens give the same bytes in both. `KvIdentity` has
all keys of config.json but the harmless ones listed here. A missing entry of the list costs a cold
cache. A wrong entry costs wrong answers.

Not here: the weights (../checkpoint.py), the options of an engine (its folder).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.engine.model_config import read_json

HARMLESS_KEYS = frozenset({
    "_name_or_path", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id",
    "use_cache", "initializer_range", "attention_dropout",
})  # fmt: skip

# Optional files with the quantisation of tensors, KV among them.
QUANTISATION_FILES = ("hf_quant_config.json", "quant_cfg.json", "dtypes.json")


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """How the weights are used; its repr is hashed with them."""

    config: str
    quantisation: str

    @classmethod
    def of_folder(cls, folder: Path) -> KvIdentity:
        """`folder` has a readable config.json."""
        config = read_json(folder / "config.json", [])
        there = [name for name in QUANTISATION_FILES if (folder / name).exists()]
        beside = {name: read_json(folder / name, []) for name in there}
        return cls(canonical(without_harmless_keys(config or {})), canonical(beside))


def without_harmless_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: inner for key, inner in value.items() if key not in HARMLESS_KEYS}
        return {key: without_harmless_keys(inner) for key, inner in kept.items()}
    if isinstance(value, list):
        return [without_harmless_keys(inner) for inner in value]
    return value


def canonical(value: Any) -> str:
    """The same text for equal JSON values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
