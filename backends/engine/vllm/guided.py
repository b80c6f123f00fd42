"""Grammars of answers, in the forms that vLLM's structured output takes.

vLLM compiles them with its backend `guidance`, which is llguidance, as for the torch engine. So the
texts mean the same (text/guides.py).

Not here: the grammar matcher in vLLM's scheduler (answer_grammar.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.tensors import JSON_SCHEMA, REGEX, TAGS
from backends.text.guides import check_grammar, guided_schema, tagged_grammar

GUIDED_BACKEND = {"backend": "guidance"}  # vLLM's structured_outputs_config


def special_ids(folder: Path, end_ids: Sequence[int]) -> dict[str, int]:
    """Text -> id of each special token of a checkpoint, without end tokens. As for llguidance, each
    added token of the tokenizer is special."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    added = json.loads(path.read_bytes()).get("added_tokens") or ()
    return {each["content"]: each["id"] for each in added if each["id"] not in end_ids}


def structured_outputs(kind: str, text: str, special: Mapping[str, int]) -> dict[str, Any]:
    """Keywords of vLLM's StructuredOutputsParams. `special`: as of `special_ids`. Raises
    InvalidRequest."""
    if kind == JSON_SCHEMA:
        return {"json": json.dumps(guided_schema(text))}
    if kind in TAGS:
        return {"grammar": tagged_grammar(kind, text, special)}
    if kind == REGEX:
        return {"regex": text}
    check_grammar(text)
    return {"grammar": text}
