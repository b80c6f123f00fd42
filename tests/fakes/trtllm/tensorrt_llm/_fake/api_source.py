"""The text of the connector API's modules, written from what this project records of TensorRT-LLM.

A name, an argument or an order that is recorded wrongly is wrong in the stand-in too, and
`mooncake doctor --engine tensorrt_llm` finds it where TensorRT-LLM is. The methods' bodies are in
kept.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from backends.doctor.contract.recorded import ApiClass, Contract, Method

HEAD = """from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._fake import kept
"""
LISTS = ("SchedulerOutput",)  # all fields are lists, empty at first
BY_HAND = (
    "KvCacheConnectorSchedulerOutputRequest", "KvCacheConnectorSchedulerOutputManager",
    "KvCacheConnectorManager",
)  # fmt: skip


def api_source(contract: Contract, file: str) -> str:
    """Of the module whose path ends with `file`."""
    pieces = [
        piece
        for piece in contract.pieces
        if any(each.endswith(file) for each in piece.files) and piece.name not in BY_HAND
    ]
    return HEAD + "".join(line + "\n" for piece in pieces for line in class_lines(piece))


def class_lines(piece: ApiClass) -> Iterator[str]:
    yield "\n"
    if piece.fields:
        yield "@dataclass"
    yield f"class {piece.name}{'' if piece.fields else '(ABC)'}:"
    for name in piece.fields:
        is_list = piece.name in LISTS
        yield f"    {name}: Any" + (" = field(default_factory=list)" if is_list else "")
    for name, method in piece.methods.items():
        yield from method_lines(piece.name, name, method)


def method_lines(cls: str, name: str, method: Method) -> Iterator[str]:
    if method.is_abstract:
        yield "    @abstractmethod"
        yield f"    def {name}({', '.join(method.arguments)}): ..."
        return
    yield f"    def {name}({', '.join(method.arguments)}):"
    yield f"        return kept.{cls}.{name}({', '.join(method.arguments)})"
