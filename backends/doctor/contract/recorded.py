"""The parts of TensorRT-LLM's interface that this project uses, by KV cache manager.

`api.json` has them: written by hand, from upstream's sources (docs/reference/tensorrt-llm.md names
releases and files). The stand-in of the tests is made of the same file. Pure but for `read`.

Not here: reading an installed package (sources.py), comparing (comparison.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).with_name("api.json")


@dataclass(frozen=True, slots=True)
class Method:
    arguments: tuple[str, ...]  # names, in order
    is_abstract: bool = False


@dataclass(frozen=True, slots=True)
class ApiClass:
    """One class of TensorRT-LLM."""

    name: str
    files: tuple[str, ...]  # inside the package; releases have it in one of them
    methods: dict[str, Method] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    members: tuple[str, ...] = ()  # fields, methods or attributes that `__init__` sets
    takes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # arguments, among others
    is_positional: bool = False  # it is built from `fields` in this order, without names
    is_ours: bool = False  # our classes derive from it, so it may have no other abstract method


@dataclass(frozen=True, slots=True)
class CallOrders:
    """One class, with the order in which its methods call others."""

    name: str
    files: tuple[str, ...]
    orders: dict[str, tuple[str, ...]]  # method -> called methods, as they stand in its text


@dataclass(frozen=True, slots=True)
class Contract:
    manager: int  # V1 | V2 of releases.py
    pieces: tuple[ApiClass, ...]
    calls: tuple[str, ...]  # that a connector gets for the requests of driving.py, in order
    steps: tuple[CallOrders, ...]


def read(manager: int, path: Path = FILE) -> Contract:
    return contract_of(msgspec.json.decode(path.read_bytes()), manager)


def contract_of(raw: dict[str, Any], manager: int) -> Contract:
    """`raw` as in api.json. An entry with `manager` concerns that one only."""
    return Contract(
        manager,
        tuple(
            _piece(name, tuple(group["files"]), entry, manager)
            for group in raw["groups"]
            for name, entry in group["classes"].items()
            if _concerns(entry, manager)
        ),
        tuple(raw["calls"][str(manager)]),
        tuple(
            CallOrders(
                name, tuple(found["files"]), {m: tuple(o) for m, o in found["orders"].items()}
            )
            for name, found in raw["steps"][str(manager)].items()
        ),
    )


def _concerns(entry: dict[str, Any], manager: int) -> bool:
    return entry.get("manager", manager) == manager


def _piece(name: str, files: tuple[str, ...], entry: dict[str, Any], manager: int) -> ApiClass:
    methods = {
        each: Method(tuple(found["arguments"]), found.get("is_abstract", False))
        for each, found in entry.get("methods", {}).items()
        if _concerns(found, manager)
    }
    return ApiClass(
        name,
        files,
        methods,
        tuple(entry.get("fields", ())),
        tuple(entry.get("members", ())),
        {each: tuple(names) for each, names in entry.get("takes", {}).items()},
        entry.get("is_positional", False),
        entry.get("is_ours", False),
    )
