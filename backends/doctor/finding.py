"""What a doctor finds: one line each, how bad it is, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, NOTE, WARNING, BROKEN = "ok", "note", "warning", "BROKEN"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is there unless the state is ok."""

    subject: str
    state: str  # ok | note: may be meant | warning: works, and not well | BROKEN: does not work
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        said = f"{self.state:<8} {self.subject}: {self.what}"
        return f"{said}\n{'':<9}-> {self.remedy}" if self.remedy else said


def is_broken(findings: Iterable[Finding]) -> bool:
    return any(finding.state == BROKEN for finding in findings)
