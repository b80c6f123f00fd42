"""One metrics page of many: each Triton has its own, an operator wants one. Pure.

Ours (`metrics/table.py`) carry the name of their model already; Triton's own get a label `triton`.
A family's HELP and TYPE stand once. What a life of a Triton has counted is kept when it ends, so
no counter falls; its gauges go with it. Not here: fetching and serving pages (metrics_server.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(slots=True)
class Family:
    kind: str = "untyped"
    meaning: str = ""
    samples: dict[str, str] = field(default_factory=dict)  # `name{labels}` -> value as written

    @property
    def is_counted(self) -> bool:
        return self.kind in ("counter", "histogram")


Families = dict[str, Family]


def parse(text: str, label: str, is_ours: Mapping[str, object]) -> Families:
    """A page by families; samples of those that are not `is_ours` get `label`."""
    families: Families = {}
    for line in text.splitlines():
        if line.startswith("# "):
            mark, _, rest = line[2:].partition(" ")
            name, _, told = rest.partition(" ")
            if mark == "HELP":
                families.setdefault(name, Family()).meaning = told
            elif mark == "TYPE":
                families.setdefault(name, Family()).kind = told
        elif found := SAMPLE.match(line):
            name, labels = found["name"], found["labels"] or ""
            family = _family_of(name, families)
            if family not in is_ours:
                labels = f"{labels},{label}" if labels else label
            key = f"{name}{{{labels}}}" if labels else name
            families.setdefault(family, Family()).samples[key] = found["value"]
    return families


def _family_of(sample: str, families: Families) -> str:
    for suffix in SUFFIXES:
        if sample not in families and sample.removesuffix(suffix) in families:
            return sample.removesuffix(suffix)
    return sample


class MergedPage:
    """The pages of several Tritons, newest life each."""

    def __init__(self, is_ours: Mapping[str, object]) -> None:
        self._is_ours = is_ours
        self._lives: dict[str, int] = {}
        self._pages: dict[str, Families] = {}  # by Triton, of its life
        self._ended: Families = {}  # what lives that ended have counted

    def take(self, triton: str, life: int, text: str) -> None:
        """What this life of a Triton says now. Lives are numbered: the next has a larger one."""
        if life > self._lives.get(triton, 0):
            for name, family in self._pages.pop(triton, {}).items():
                if family.is_counted:
                    kept = self._ended.setdefault(name, Family(family.kind, family.meaning))
                    for key, value in family.samples.items():
                        kept.samples[key] = _sum(kept.samples.get(key), value)
        if life >= self._lives.get(triton, 0):
            self._lives[triton] = life
            self._pages[triton] = parse(text, f'triton="{triton}"', self._is_ours)

    def silent(self, triton: str) -> None:
        """It says nothing (any more): what it counted stays, the rest goes."""
        page = self._pages.get(triton, {})
        for name in [name for name, family in page.items() if not family.is_counted]:
            del page[name]

    def text(self) -> str:
        merged: Families = {}
        for families in (self._ended, *(self._pages[name] for name in sorted(self._pages))):
            for name, family in families.items():
                into = merged.setdefault(name, Family(family.kind, family.meaning))
                for key, value in family.samples.items():
                    before = into.samples.get(key)
                    into.samples[key] = _sum(before, value) if family.is_counted else value
        return "".join(f"{line}\n" for line in _lines(merged))


def _sum(before: str | None, value: str) -> str:
    return value if before is None else repr(float(before) + float(value))


def _lines(families: Families) -> Iterator[str]:
    for name, family in sorted(families.items()):
        yield f"# HELP {name} {family.meaning}"
        yield f"# TYPE {name} {family.kind}"
        for key, value in family.samples.items():
            yield f"{key} {value}"
