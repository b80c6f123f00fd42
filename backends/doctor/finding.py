"""A finding of `mooncake doctor`: one line, its severity, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, NOTE, WARNING, BROKEN = "ok", "note", "warning", "BROKEN"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is empty only if the state is ok."""

    subject: str
    state: str  # ok; note: may be intended; warning: works badly; BROKEN: does not work
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        said = f"{self.state:<8} {self.subject}: {self.what}"
        return f"{said}\n{'':<9}-> {self.remedy}" if self.remedy else said


def is_broken(findings: Iterable[Finding]) -> bool:
    return any(finding.state == BROKEN for finding in findings)
