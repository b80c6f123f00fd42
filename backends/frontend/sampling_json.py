"""`sampling_parameters`: vLLM's way to send all sampling parameters as one JSON object.

Load generators for vLLM's backend write numbers as strings ({"max_tokens": "6"}), so both are
read. Keys that we do not support are refused by name. Not here: defaults, and tensors that say the
same, which win (backends/frontend/sampling.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from backends.frontend.values import (
    INTEGER_MAX,
    InputReader,
    as_text,
    did_you_mean,
    from_json,
    shown,
)

NAME = "sampling_parameters"
BYTES_MAX = 64 * 1024
TRUE, FALSE = ("true", "1"), ("false", "0")


def read(reader: InputReader) -> dict[str, Any]:
    """The parameters that are given, under our names and with their types."""
    text = reader.text(NAME, BYTES_MAX)
    if text is None or not text.strip():
        return {}
    content, problem = from_json(NAME, text)
    if not problem and not isinstance(content, dict):
        problem = f"{NAME} is {shown(content)}; send a JSON object"
    if problem:
        reader.note(problem)
        return {}
    unknown = sorted(key for key in content if key not in KEYS)
    reader.note_some([
        f"{NAME}: {shown(key)} is not supported{did_you_mean(key, KEYS)}" for key in unknown
    ])  # fmt: skip
    found: dict[str, Any] = {}
    for key in KEYS:
        if content.get(key) is None:
            continue
        try:
            found[key] = KEYS[key](content[key])
        except (ValueError, OverflowError) as error:
            reader.note(f"{NAME}: {key} is {shown(content[key])}; {error}")
    if found.get("top_k") == -1:  # vLLM's word for all tokens
        found["top_k"] = 0
    return found


def _integer(value: Any) -> int:
    if isinstance(value, str):
        value = float(value) if "." in value or "e" in value.lower() else int(value)
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or isinstance(value, bool) or abs(value) > INTEGER_MAX:
        raise ValueError("send a whole number")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("send a number")
    number = float(value)
    if math.isinf(number):
        raise ValueError("send a finite number")
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    lowered = str(value).strip().lower()
    if lowered not in TRUE + FALSE:
        raise ValueError("send true or false")
    return lowered in TRUE


def _words(value: Any) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list):
        raise ValueError("send a string or a list of strings")
    read = [as_text("a stop word", word) for word in words]
    if problem := next((problem for _, problem in read if problem), ""):
        raise ValueError(problem)
    return [text for text, _ in read if text is not None]


KEYS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": _integer,
    "min_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "seed": _integer,
    "stop": _words,
    "ignore_eos": _flag,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
}
