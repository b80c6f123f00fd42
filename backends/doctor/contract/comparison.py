"""Compares TensorRT-LLM's sources with the parts of them that this project uses. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from backends.doctor.contract.recorded import ApiClass, CallOrders, Contract
from backends.doctor.contract.sources import ClassFacts, Function, Sources, calls_in


class ApiDifference(NamedTuple):
    where: str  # file and class or method
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Comparison(NamedTuple):
    differences: list[ApiDifference]
    checked: int  # facts that were looked at
    unread: list[str]  # files that the sources do not have, so nothing in them was compared


def compare(contract: Contract, sources: Sources, calls: Sequence[str] | None) -> Comparison:
    """`calls`: what driving.py has recorded; None: it could not run."""
    found: list[ApiDifference] = []
    unread: set[str] = set()
    checked = 0
    for piece in contract.pieces:
        path = sources.file(piece.files)
        if path is None:
            unread.add(" or ".join(piece.files))
            continue
        where = f"{path.relative_to(sources.folder)}: {piece.name}"
        facts = sources.classes(path).get(piece.name)
        checked += 1 + len(piece.methods) + len(piece.fields) + len(piece.members)
        checked += sum(map(len, piece.takes.values()))
        if facts is None:
            found.append(ApiDifference(where, "there is no such class"))
        else:
            found += [ApiDifference(where, what) for what in piece_differences(piece, facts)]
    for steps in contract.steps:
        path = sources.file(steps.files)
        if path is None:
            unread.add(" or ".join(steps.files))
            continue
        checked += len(steps.orders)
        where = f"{path.relative_to(sources.folder)}: {steps.name}"
        bodies = sources.classes(path).get(steps.name, ClassFacts()).bodies
        found += [
            ApiDifference(f"{where}.{m}", what) for m, what in step_differences(steps, bodies)
        ]
    if calls is not None:
        checked += len(contract.calls)
        where = "calls of a connector, driven by its manager"
        found += [ApiDifference(where, what) for what in order_differences(contract.calls, calls)]
    return Comparison(found, checked, sorted(unread))


def step_differences(
    steps: CallOrders, bodies: Mapping[str, Function]
) -> Iterator[tuple[str, str]]:
    """(method, difference)"""
    names = sorted({name for order in steps.orders.values() for name in order})
    for method, order in steps.orders.items():
        if method not in bodies:
            yield method, "there is no such method"
            continue
        for what in order_differences(order, list(calls_in(bodies[method], names))):
            yield method, what


def piece_differences(piece: ApiClass, facts: ClassFacts) -> Iterator[str]:
    for name, method in piece.methods.items():
        there = facts.methods.get(name)
        if there is None:
            yield f"there is no method {name}"
            continue
        if there.arguments != method.arguments:
            theirs, ours = ", ".join(there.arguments), ", ".join(method.arguments)
            yield f"{name}({theirs}) is known as {name}({ours})"
        if there.is_abstract != method.is_abstract:
            yield f"{name} is {'' if there.is_abstract else 'not '}abstract"
    for name, arguments in piece.takes.items():
        known = facts.methods[name].arguments if name in facts.methods else ()
        for argument in arguments:
            if argument not in known:
                yield f"{name} does not take {argument}{like(argument, known)}"
    if piece.is_ours:
        abstract = {name for name, method in facts.methods.items() if method.is_abstract}
        for name in sorted(abstract - piece.methods.keys()):
            yield f"{name} is abstract, and our class does not have it"
    if piece.is_positional:
        yield from positional_differences(piece.fields, facts.fields)
    else:
        for name in piece.fields:
            if name not in facts.fields:
                yield f"there is no field {name}{like(name, facts.fields)}"
    for name in piece.members:
        if name not in facts.members:
            yield f"there is no {name}{like(name, facts.members)}"


def positional_differences(ours: Sequence[str], theirs: dict[str, bool]) -> Iterator[str]:
    names = list(theirs)
    if tuple(names[: len(ours)]) != tuple(ours):
        yield f"its fields begin with {', '.join(names[: len(ours)])}, not {', '.join(ours)}"
    needed = [name for name in names if name not in ours and not theirs[name]]
    if needed:
        yield f"{', '.join(needed)} must be given, and we do not"


def like(name: str, names: Sequence[str] | dict[str, bool] | set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; {near[0]} is like it" if near else ""


def order_differences(known: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    """One line for each run of calls that differs."""
    matcher = difflib.SequenceMatcher(None, known, there, autojunk=False)
    for kind, low, high, first, stop in matcher.get_opcodes():
        if kind == "equal":
            continue
        after = f"after {known[low - 1]}" if low else "at first"
        expected = ", ".join(known[low:high]) or "nothing"
        yield f"{after}: {', '.join(there[first:stop]) or 'nothing'}, where {expected} is known"
