"""Reads a request's tensors, and checks their number of values, type and UTF-8.

Reading never raises. A mistake is noted in `problems`, and the value counts as not given, so that a
client gets all mistakes at once. Not here: the meaning of the values (request.py).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from backends import tensors

KINDS = {"INT32": "iu", "UINT64": "iu", "FP32": "f", "BOOL": "b", "STRING": "OSU"}
DTYPES = {tensor.name: tensor.dtype for tensor in tensors.SUPPORTED_INPUTS}
NAMES = (*DTYPES, *(tensor.name for tensor in tensors.UNSUPPORTED_INPUTS))
SHOWN_CHARACTERS_MAX = 40
SHOWN_PROBLEMS_MAX = 3  # problems listed for the values of one tensor, or for unknown names
INTEGER_MAX = 2**64 - 1


class InputReader:
    """The inputs of one request, and the problems found in them."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = {name: np.asarray(value).reshape(-1) for name, value in inputs.items()}
        self.problems: list[str] = []
        unknown = [name for name in self._inputs if name not in NAMES]
        self.note_some(
            [f"unknown input {shown(name)}{did_you_mean(name, NAMES)}" for name in unknown]
        )
        self.problems += tensors.refusals(self._inputs)

    def has(self, name: str) -> bool:
        return name in self._inputs

    def note(self, problem: str) -> None:
        self.problems.append(problem)

    def note_some(self, problems: list[str]) -> None:
        """Note the first few problems and the number of the others."""
        self.problems += problems[:SHOWN_PROBLEMS_MAX]
        if len(problems) > SHOWN_PROBLEMS_MAX:
            self.problems.append(f"and {len(problems) - SHOWN_PROBLEMS_MAX} more of this kind")

    def integer(self, name: str) -> int | None:
        value = self._single(name)
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        """The shortest decimal of this float32 as a float (0.7 stays 0.7); None if not given."""
        value = self._single(name)
        return None if value is None else float(str(value))

    def flag(self, name: str) -> bool:
        """The flag's value; False if it is not given."""
        return bool(self._single(name))

    def text(self, name: str, bytes_max: int) -> str | None:
        value = self._single(name)
        if value is None:
            return None
        size_bytes = len(value) if isinstance(value, bytes | str) else 0
        if size_bytes > bytes_max:
            self.note(f"{name} has {size_bytes:,} bytes; send at most {bytes_max:,}")
            return None
        text, problem = as_text(name, value)
        self.problems += [problem] if problem else []
        return text

    def texts(self, name: str) -> list[str] | None:
        values = self.values(name)
        if values is None:
            return None
        read = [as_text(f"{name}[{index}]", value) for index, value in enumerate(values.tolist())]
        self.note_some([problem for _, problem in read if problem])
        return [text for text, _ in read if text is not None]

    def _single(self, name: str) -> Any:
        values = self.values(name)
        if values is None:
            return None
        if values.size != 1:
            self.note(f"{name} has {values.size} values; send one, or leave it out")
            return None
        return values[0]

    def values(self, name: str) -> np.ndarray | None:
        """All values of a tensor; None if it is not given, or has a wrong type."""
        values = self._inputs.get(name)
        if values is not None and values.dtype.kind not in KINDS[DTYPES[name]]:
            self.note(f"{name} has type {values.dtype}; send it as {DTYPES[name]}")
            return None
        return values


def as_text(name: str, value: Any) -> tuple[str | None, str]:
    """(text, "") or (None, problem)."""
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")  # lone surrogates are rejected below
    if not isinstance(value, bytes):
        return None, f"{name} is {shown(value)}; send a string"
    try:
        return value.decode(), ""
    except UnicodeDecodeError as error:
        return None, f"{name} is not valid UTF-8 at byte {error.start}; send UTF-8"


def from_json(name: str, text: str) -> tuple[Any, str]:
    """(value, "") or (None, problem)."""
    try:
        return json.loads(text), ""
    except (ValueError, RecursionError) as error:
        return None, f"{name} is not valid JSON: {error}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name; "" if no known name is similar."""
    close = difflib.get_close_matches(str(name)[:64], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: Any) -> str:
    """The value's repr, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."
