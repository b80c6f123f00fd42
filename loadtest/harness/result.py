"""The shape of the result of every benchmark and every simulated experiment.

    {"name": ..., "seconds": ..., "rows": [{...}], "targets": [{"name", "value", "op", "goal"}]}

A simulated experiment adds "constants", its assumptions. "shortened" is why less was run than the
targets are for, or why a benchmark ended early; "" when all of it was run.

Each promised number has one target. A value that could not be measured is null and has a `why`; it
is never left out, and never a guess. The exit status states that the benchmark ran, not that its
targets were met.

Not here: measuring (one file per benchmark).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Target:
    """A promised number beside its measured value."""

    name: str
    value: float | None
    op: str  # "<=" or ">="
    goal: float
    why: str = ""  # reason for a missing value, or a caveat

    def __post_init__(self) -> None:
        assert self.op in ("<=", ">="), f"{self.name}: op is {self.op!r}"
        assert self.value is not None or self.why, f"{self.name}: a missing value needs a reason"
        assert self.value is None or math.isfinite(self.value), f"{self.name} is {self.value}"

    @property
    def is_met(self) -> bool | None:
        """None when there is no value."""
        if self.value is None:
            return None
        return self.value <= self.goal if self.op == "<=" else self.value >= self.goal

    def to_json(self) -> dict[str, Cell]:
        fields = dataclasses.asdict(self)
        if not self.why:
            del fields["why"]
        return fields


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    seconds: float
    rows: Sequence[Mapping[str, Cell]]
    targets: Sequence[Target]
    constants: Mapping[str, Cell] = field(default_factory=dict)  # assumptions of a simulation
    shortened: str = ""  # why less was run than the targets are for; "": all of it was

    def to_json(self) -> str:
        """One line; rows may hold numbers, strings, booleans and null."""
        fields = {
            "name": self.name,
            "seconds": round(self.seconds, 3),
            "rows": [dict(row) for row in self.rows],
            "targets": [target.to_json() for target in self.targets],
        }
        if self.constants:
            fields |= {"constants": dict(self.constants), "shortened": self.shortened}
        elif self.shortened:
            fields["shortened"] = self.shortened
        return json.dumps(fields, allow_nan=False)

    def print(self, console: Console | None = None) -> None:
        """Tables for people, then the JSON as the last line; without `rich` only the JSON."""
        if console is None:
            try:
                from rich.console import Console
            except ImportError:
                print(self.to_json(), flush=True)
                return
            console = Console(highlight=False)
        for rows in rows_alike(self.rows):
            console.print(_rows_table(self.name, rows))
        if self.targets:
            console.print(_targets_table(self.targets))
        if self.constants:
            stated = ", ".join(f"{name} {value}" for name, value in self.constants.items())
            console.print(f"constants: {stated}", markup=False)
        if self.shortened:
            console.print(f"shortened: {self.shortened}", markup=False)
        console.file.write(self.to_json() + "\n")
        console.file.flush()


def rows_alike(rows: Sequence[Mapping[str, Cell]]) -> list[list[Mapping[str, Cell]]]:
    """Group consecutive rows with a common column, so that one table holds them."""
    found: list[list[Mapping[str, Cell]]] = []
    for row in rows:
        if not found or not any(row.keys() & other.keys() for other in found[-1]):
            found.append([])
        found[-1].append(row)
    return found


def _rows_table(name: str, rows: Sequence[Mapping[str, Cell]]) -> Table:
    from rich.table import Table

    table = Table(title=name)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        is_number = all(not isinstance(row.get(column), str) for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(shown(row.get(column)) for column in columns))
    return table


def _targets_table(targets: Sequence[Target]) -> Table:
    from rich.table import Table

    table = Table(title="targets")
    for column in ("target", "measured", "goal", "met", "why"):
        table.add_column(column, overflow="fold")
    for target in targets:
        met = {True: "yes", False: "no", None: "not measured"}[target.is_met]
        goal = f"{target.op} {shown(target.goal)}"
        table.add_row(target.name, shown(target.value), goal, met, target.why)
    return table


def shown(value: Cell) -> str:
    """A cell as a person reads it: four significant digits, with thousands separators."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, float) and abs(value) < 1_000:
        return f"{value:.4g}"
    return f"{value:,.0f}"
