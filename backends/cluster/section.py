"""One mapping of the cluster file, read key by key; mistakes are noted with line and path.

A reader reads the keys of its section and calls `close`, which reports unread keys as unknown. A
value that cannot be read is noted and replaced by its default. One pass over the file therefore
finds all mistakes.

Not here: which keys exist (deployment.py), how text becomes entries (yaml_tree.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backends.cluster.yaml_tree import YamlEntry

SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?)(iB|B)?", re.IGNORECASE)
PORT_MAX = 65_535
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(slots=True)
class Mistakes:
    """The mistakes of a file, in the order in which they were found."""

    found: list[tuple[int, str, str]] = field(default_factory=list)  # line, path, problem

    def note(self, line: int, path: str, what: str) -> None:
        if (line, path, what) not in self.found:  # an alias repeats its mistakes
            self.found.append((line, path, what))

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"line {line}: {path}: {what}" if path else f"line {line}: {what}"
            for line, path, what in sorted(self.found)
        )


class FileSection:
    """A mapping. A missing, empty or invalid section reads as a mapping without keys."""

    def __init__(
        self, entry: YamlEntry | None, path: str, mistakes: Mistakes, line: int = 1
    ) -> None:
        self.path = path
        self.mistakes = mistakes
        self.line = entry.line if entry else line
        self._keys = (entry.keys or {}) if entry else {}
        self._key_lines = entry.key_lines if entry else {}
        self._read: set[str] = set()  # keys that were read
        self.is_there = bool(entry and entry.keys is not None)
        if entry and entry.keys is None and not entry.is_empty:
            mistakes.note(entry.line, path, "must be a mapping of keys to values")

    def path_of(self, key: str) -> str:
        return ".".join(filter(None, (self.path, key)))

    def line_of(self, key: str) -> int:
        return self._key_lines.get(key, self.line)

    def note(self, key: str, what: str) -> None:
        """Note a mistake at this key; "" stands for the section itself."""
        self.mistakes.note(self.line_of(key), self.path_of(key), what)

    def has(self, key: str) -> bool:
        return key in self._keys and not self._keys[key].is_empty

    def entry(self, key: str) -> YamlEntry | None:
        self._read.add(key)
        return self._keys.get(key)

    def section(self, key: str) -> FileSection:
        return FileSection(self.entry(key), self.path_of(key), self.mistakes, self.line_of(key))

    def sections(self) -> Iterator[tuple[str, FileSection]]:
        """Each name of the mapping with its section."""
        for name in self._keys:
            yield name, self.section(name)

    def names(self) -> list[str]:
        return list(self._keys)

    def others(self, *excluded: str) -> dict[str, str]:
        """The keys except `excluded`, which must have single values."""
        return {
            name: text
            for name in self._keys
            if name not in excluded
            if (text := self.text(name)) is not None
        }

    def text(self, key: str) -> str | None:
        """A single value as it is written; None if the key has no value."""
        entry = self.entry(key)
        if entry is None or entry.is_empty:
            return None
        if entry.text is None:
            self.note(key, "must be a single value")
        return entry.text

    def word(self, key: str, default: str, is_right: Callable[[str], object], wanted: str) -> str:
        text = self.text(key)
        if text is None:
            return default
        if not is_right(text):
            self.note(key, f"is {text!r}; use {wanted}")
            return default
        return text

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        return self.word(key, default, choices.__contains__, " or ".join(choices))

    def number(self, key: str, default: int, least: int, most: int) -> int:
        text = self.text(key)
        if text is None:
            return default
        if not re.fullmatch(r"0|[1-9]\d{0,14}", text, re.ASCII):
            self.note(key, f"is {text!r}; write a whole number, {least} to {most}")
        elif not least <= int(text) <= most:
            self.note(key, f"is {text}; use {least} to {most}")
        else:
            return int(text)
        return default

    def port(self, key: str, default: int) -> int:
        return self.number(key, default, 1, PORT_MAX)

    def size_bytes(self, key: str, default: int, least: int = 0) -> int:
        text = self.text(key)
        if text is None:
            return default
        match = SIZE.fullmatch(text.strip()) if text.isascii() else None
        if match is None:
            self.note(key, f"is {text!r}, which is no size; use a size like 512M or 4G")
            return default
        size = int(match[1]) * UNITS[match[2].upper()]
        if size < least:
            self.note(key, f"is {size} bytes; use {least >> 20}M or more")
        return size

    def truth(self, key: str, default: bool) -> bool:
        text = self.text(key)
        if text is None or text.lower() in TRUE + FALSE:
            return default if text is None else text.lower() in TRUE
        self.note(key, f"is {text!r}; write true or false")
        return default

    def words(self, key: str, if_twice: str = "remove one") -> list[tuple[str, int]]:
        """A list of single values, each with its line. A single value counts as a list of one."""
        entry = self.entry(key)
        if entry is None or entry.is_empty:
            return []
        if entry.text is not None:
            return [(entry.text, entry.line)]
        if entry.items is None:
            self.note(key, "must be a list, like [a, b]")
            return []
        found: list[tuple[str, int]] = []
        for item in entry.items:
            if item.text is None:
                self.mistakes.note(item.line, self.path_of(key), "must be a list of single values")
            elif item.text in {word for word, _ in found}:
                what = f"{item.text} is listed twice: {if_twice}"
                self.mistakes.note(item.line, self.path_of(key), what)
            else:
                found.append((item.text, item.line))
        return found

    def close(self) -> None:
        """Note the keys that were not read."""
        for name in self._keys:
            if name not in self._read:
                self.note(name, f"unknown key{did_you_mean(name, self._read)}")


def did_you_mean(word: str, known: set[str]) -> str:
    """The remedy for an unknown word, to be appended to the problem."""
    near = difflib.get_close_matches(word[:100], sorted(known), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""
