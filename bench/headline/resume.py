"""The resume folder: each finished part of the measurement is a JSON file, and a re-run skips it.

    settings.json          seed, requests, checkpoint: a re-run with others is refused
    capacity.json          tried rates of (a) and their shares of good requests
    idle.json              details of the requests that (a) answered while idle
    choices.json           what a short search chose: --max-num-batched-tokens, the router's policy
    cells/*.json           one (round, system, trace, load) each, with every request's details
    logs/                  of the servers, of their last start
    state/                 compiled code of vLLM, measured speeds of ours; no KV

A file is replaced atomically, so an interrupted run leaves none half written.

Not here: measuring (measure.py), medians of the cells (summary.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.headline.goodput import RequestDetail


@dataclass(frozen=True, slots=True)
class CellKey:
    round: int  # from 1
    system: str
    trace: str
    load: float  # times (a)'s capacity

    @property
    def file(self) -> str:
        return f"{self.round}-{self.system}-{self.trace}-{self.load:g}.json"


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    key: CellKey
    rate_per_s: float
    details: tuple[RequestDetail, ...]  # empty when the system failed
    start_s: float  # until the system was ready
    taken_s: float
    load_before: float  # load average of one minute, before the system was started
    load_after: float  # when the cell ended
    why: str = ""  # why the system failed; "": it ran


class ResumeFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs, self.state = folder / "logs", folder / "state"
        self._cells = folder / "cells"
        self._cells.mkdir(parents=True, exist_ok=True)
        self.state.mkdir(exist_ok=True)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Remember the settings; ValueError when the folder is of a run with others."""
        before = self.read("settings")
        if before is None:
            self.write("settings", dict(settings))
        elif before != dict(settings):
            raise ValueError(
                f"{self.folder} is of a run with other settings ({before}); name another folder "
                "with --resume, or use those"
            )

    def read(self, name: str) -> Any:
        """The content of NAME.json; None when it is not there."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write(self, name: str, content: Any) -> None:
        path = self.folder / f"{name}.json"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)

    def has(self, key: CellKey) -> bool:
        return (self._cells / key.file).exists()

    def save(self, cell: MeasuredCell) -> None:
        self.write(f"cells/{cell.key.file.removesuffix('.json')}", dataclasses.asdict(cell))

    def cells(self) -> list[MeasuredCell]:
        """All finished cells, by round, system, trace and load."""
        found = [_cell(json.loads(path.read_text())) for path in self._cells.glob("*.json")]
        return sorted(found, key=lambda cell: dataclasses.astuple(cell.key))


def details_of(rows: Sequence[Mapping[str, Any]]) -> list[RequestDetail]:
    return [RequestDetail(**{**row, "itls_s": tuple(row["itls_s"])}) for row in rows]


def _cell(fields: Mapping[str, Any]) -> MeasuredCell:
    key = CellKey(**fields["key"])
    return MeasuredCell(**{**fields, "key": key, "details": tuple(details_of(fields["details"]))})
