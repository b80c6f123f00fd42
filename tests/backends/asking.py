"""Asking the front in a test: inputs as Triton hands them over, and what a refusal says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from backends import tensors
from backends.errors import InvalidRequest
from backends.frontend.request import ClientRequest, RequestLimits, parse
from backends.text.tokenizer import Tokenizer
from tests.backends.small_tokenizers import BOS, CHAT_TEMPLATE, EOS, byte_level

TOKENIZER = Tokenizer(
    byte_level(adds_bos=True), {"eos_token": EOS, "bos_token": BOS, "chat_template": CHAT_TEMPLATE}
)
LIMITS = RequestLimits(context_tokens_max=512, vocabulary_tokens=TOKENIZER.vocabulary_tokens)
DTYPES = {tensor.name: tensor.dtype for tensor in tensors.SUPPORTED_INPUTS}
DTYPES |= {tensor.name: tensor.dtype for tensor in tensors.UNSUPPORTED_INPUTS}
NUMPY_TYPES: dict[str, object] = {
    "STRING": np.object_,
    "INT32": np.int32,
    "FP32": np.float32,
    "FP16": np.float16,
    "BOOL": np.bool_,
    "UINT64": np.uint64,
}


def array(name: str, value: Any) -> np.ndarray:
    """As Triton hands it over: strings are bytes in an object array."""
    values = value if isinstance(value, list) else [value]
    if DTYPES.get(name) == "STRING":
        values = [item.encode() if isinstance(item, str) else item for item in values]
        found = np.empty(len(values), np.object_)
        found[:] = values
        return found
    return np.array(values, NUMPY_TYPES[DTYPES[name]])  # type: ignore[call-overload]


def ask(parameters: dict[str, Any] | None = None, **inputs: Any) -> ClientRequest:
    given = (
        inputs
        if {"input_ids", "messages", "text_input"} & set(inputs)
        else {"text_input": "hello", **inputs}
    )
    arrays = {name: array(name, value) for name, value in given.items() if value is not None}
    return parse(arrays, parameters or {}, TOKENIZER, LIMITS)


def refusal(parameters: dict[str, Any] | None = None, **inputs: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        ask(parameters, **inputs)
    return str(caught.value)


def assert_matches(expected: str, message: str) -> None:
    assert re.search(expected, message), message


@dataclass
class Client:
    """Remembers its messages and how they ended."""

    outputs: frozenset[str] = frozenset({"output_ids", "decision"})
    ids: list[int] = field(default_factory=list)
    decisions: list[bytes] = field(default_factory=list)
    ends: list[Exception | str] = field(default_factory=list)
    is_gone: bool = False
    error: Exception | None = None  # of every message

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        if self.error is not None:
            raise self.error
        self.ids += outputs["output_ids"].tolist()
        self.decisions.append(outputs["decision"][0])
        if is_final:
            self.ends.append("answered")

    def finish(self) -> None:
        if self.ends != ["answered"]:
            self.ends.append("finished")

    def fail(self, error: Exception) -> None:
        self.ends.append(error)

    def is_cancelled(self) -> bool:
        return self.is_gone
