"""Two runs number by number. Pure: recordings in, rows out.

A ratio says how much; whether it is chance only more runs can say, so nothing is judged here.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.report.numbers import Number, numbers, shown
from loadtest.results.recording import Recording


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of both runs; None where a run has not measured it."""

    name: str
    label: str
    unit: str
    better: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        return self.b - self.a if self.a is not None and self.b is not None else None

    @property
    def ratio(self) -> float | None:
        """B / A; None as well when A is 0."""
        return self.b / self.a if self.a and self.b is not None else None

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """A, B, B - A, B / A."""
        difference = ratio = "-"
        if self.difference is not None:
            sign = "+" if self.difference > 0 else "-" if self.difference < 0 else ""
            size = shown(abs(self.difference), self.unit)
            if self.unit == "share":  # a difference of percentages is no percentage
                size = size.replace("%", " points")
            difference = sign + size
        if self.ratio is not None:
            ratio = f"{self.ratio:.2f}"
        return shown(self.a, self.unit), shown(self.b, self.unit), difference, ratio


def compare(a: Recording, b: Recording) -> list[Compared]:
    """Every number that a run has measured, in the order of numbers.py."""
    of_a, of_b = ({number.name: number for number in numbers(run)} for run in (a, b))
    found = []
    for name in dict.fromkeys([*of_a, *of_b]):
        known: Number = of_a.get(name) or of_b[name]
        row = Compared(
            name, known.label, known.unit, known.better, _value(of_a, name), _value(of_b, name)
        )
        if row.a is not None or row.b is not None:
            found.append(row)
    return found


def _value(found: dict[str, Number], name: str) -> float | None:
    """A reason that no request of this run was rejected for is a 0, not a gap."""
    if name in found:
        return found[name].value
    assert ":" in name, f"{name} is in one run only"
    return 0
