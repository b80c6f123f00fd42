"""One mapping of the cluster file, read key by key; mistakes are noted with line and path.

cluster_file.py reads the keys of a section and calls `close`, which notes unread keys as unknown.
An invalid value is noted as a mistake, and reading continues with the next key. One pass therefore
finds all mistakes of a file, unless `read_tree` raises YamlInvalid.

YAML is parsed into a tree whose entries have line numbers. A scalar keeps its text, so `yes`,
`0700` and `1:30` are not converted. `FileSection` converts the text of a port or a size. Aliases
and merge keys (`<<`) are supported. YAML's standard tags, such as `!!str`, are ignored. Other tags,
duplicate keys, entries that contain themselves, and more than ENTRIES_MAX entries are rejected.

Not here: the keys themselves (cluster_file.py reads them into the classes of deployment.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import yaml

SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?)(iB|B)?", re.IGNORECASE)
PORT_MAX = 65_535
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")
CHARACTERS_MAX = 256 * 1024
ENTRIES_MAX = 20_000  # limit of the number of entries; an entry counts again at each of its aliases
DEPTH_MAX = 20
NOTHING = ("", "~", "null", "Null", "NULL")  # unquoted scalars that count as an empty entry
PLAIN_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "merge", "value", "map", "seq")
MERGE = "<<"


class YamlInvalid(Exception):
    """The text cannot be read as YAML; the message names the line and the problem."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")


@dataclass(slots=True)
class YamlEntry:
    """One value of the file. It has one of `text`, `items` and `keys`; an empty value has none."""

    line: int  # line at which the value begins, counted from 1
    text: str | None = None  # for a scalar
    items: list[YamlEntry] | None = None  # for a list
    keys: dict[str, YamlEntry] | None = None  # for a mapping
    key_lines: dict[str, int] = field(default_factory=dict)  # key of the mapping -> its line

    @property
    def is_empty(self) -> bool:
        return self.text is None and self.items is None and self.keys is None


def read_tree(text: str) -> tuple[YamlEntry, list[tuple[int, str]]]:
    """The tree, and (line, problem) of each mistake in it. An empty text gives an empty entry.
    Raises only YamlInvalid: the text is not YAML, or is above a limit."""
    if len(text) > CHARACTERS_MAX:
        what = f"{len(text)} characters, but the limit is {CHARACTERS_MAX}: check the file's name"
        raise YamlInvalid(1, what)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise YamlInvalid(_line(error), _problem(error)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        what = f"character {error.character!r} cannot be in a YAML file: {error.reason}"
        raise YamlInvalid(line, what) from None
    except RecursionError:
        raise YamlInvalid(1, "the file is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlInvalid(1, f"this is no YAML: {error}") from None
    if root is None:
        return YamlEntry(1), []
    builder = _TreeBuilder()
    return builder.entry(root, 0), builder.problems


def _line(error: yaml.MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 1


def _problem(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's message, or a clearer message for a frequent cause."""
    problem = " ".join(filter(None, (error.context, error.problem)))
    if "'\\t'" in problem or "\\t" in problem:
        return "a tab is used for indentation: indent with spaces"
    if "expected a single document" in problem:
        return "a second document begins (---): a file has only one"
    return f"this is no YAML: {problem}"


class _TreeBuilder:
    def __init__(self) -> None:
        self.problems: list[tuple[int, str]] = []
        self._entries = 0

    def entry(self, node: yaml.Node, depth: int) -> YamlEntry:
        line = node.start_mark.line + 1
        self._entries += 1
        if self._entries > ENTRIES_MAX:
            raise YamlInvalid(line, f"more than {ENTRIES_MAX} entries after aliases unfold")
        if depth > DEPTH_MAX:
            what = f"nested deeper than {DEPTH_MAX}, or an alias is inside its own anchor"
            raise YamlInvalid(line, what)
        if node.tag.removeprefix("tag:yaml.org,2002:") not in PLAIN_TAGS:
            self.problems.append(
                (line, f"the tag {node.tag} is not allowed: write the value alone")
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return YamlEntry(line, items=[self.entry(item, depth + 1) for item in node.value])
        assert isinstance(node, yaml.ScalarNode)
        is_nothing = node.style is None and node.value in NOTHING
        return YamlEntry(line, text=None if is_nothing else node.value)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> YamlEntry:
        found = YamlEntry(node.start_mark.line + 1, keys={})
        assert found.keys is not None
        merged: list[YamlEntry] = []
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append((line, "a key must be a word, not a list or a mapping"))
                continue
            if key.value == MERGE and key.style is None:
                merged += self._merged(value, depth)
            elif key.value in found.keys:
                before = found.key_lines[key.value]
                what = f"{key.value} is defined twice (first in line {before}): remove one"
                self.problems.append((line, what))
            else:
                found.keys[key.value] = self.entry(value, depth + 1)
                found.key_lines[key.value] = line
        for other in merged:  # the first mapping with a key takes precedence, as in YAML
            for name, entry in (other.keys or {}).items():
                if name not in found.keys:
                    found.keys[name] = entry
                    found.key_lines[name] = other.key_lines[name]
        return found

    def _merged(self, value: yaml.Node, depth: int) -> list[YamlEntry]:
        nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(node, yaml.MappingNode) for node in nodes):
            line = value.start_mark.line + 1
            self.problems.append((line, "<< takes a mapping or its alias, or a list of these"))
            return []
        return [self.entry(node, depth + 1) for node in nodes]


@dataclass(slots=True)
class Mistakes:
    """The mistakes of a file, in the order in which they were found."""

    found: list[tuple[int, str, str]] = field(default_factory=list)  # line, path, problem

    def note(self, line: int, path: str, what: str) -> None:
        if (line, path, what) not in self.found:  # an entry with aliases is read several times
            self.found.append((line, path, what))

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"line {line}: {path}: {what}" if path else f"line {line}: {what}"
            for line, path, what in sorted(self.found)
        )


class FileSection:
    """A mapping of the file. If it is missing, empty or invalid, it has no keys."""

    def __init__(
        self, entry: YamlEntry | None, path: str, mistakes: Mistakes, line: int = 1
    ) -> None:
        self.path = path
        self.mistakes = mistakes
        self.line = entry.line if entry else line
        self._keys = (entry.keys or {}) if entry else {}
        self._key_lines = entry.key_lines if entry else {}
        self._read: set[str] = set()  # keys that were looked up, present or not
        self.is_there = bool(entry and entry.keys is not None)
        if entry and entry.keys is None and not entry.is_empty:
            mistakes.note(entry.line, path, "must be a mapping of keys to values")

    def path_of(self, key: str) -> str:
        return ".".join(filter(None, (self.path, key)))

    def line_of(self, key: str) -> int:
        return self._key_lines.get(key, self.line)

    def note(self, key: str, what: str) -> None:
        """Note a mistake at this key. An empty `key` stands for the section itself."""
        self.mistakes.note(self.line_of(key), self.path_of(key), what)

    def has(self, key: str) -> bool:
        return key in self._keys and not self._keys[key].is_empty

    def entry(self, key: str) -> YamlEntry | None:
        self._read.add(key)
        return self._keys.get(key)

    def section(self, key: str) -> FileSection:
        return FileSection(self.entry(key), self.path_of(key), self.mistakes, self.line_of(key))

    def sections(self) -> Iterator[tuple[str, FileSection]]:
        for name in self._keys:
            yield name, self.section(name)

    def names(self) -> list[str]:
        return list(self._keys)

    def others(self, *excluded: str) -> dict[str, str]:
        """Key -> its single value, for all keys with a value except `excluded`."""
        return {
            name: text
            for name in self._keys
            if name not in excluded
            if (text := self.text(name)) is not None
        }

    def text(self, key: str) -> str | None:
        """The value as it is written. None without a value. A list or a mapping gives None too,
        and is noted as a mistake."""
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
        """(value, line) of a list of single values. A single value counts as a list of one."""
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
        """Note each key that was not looked up as unknown."""
        for name in self._keys:
            if name not in self._read:
                self.note(name, f"unknown key{did_you_mean(name, self._read)}")


def did_you_mean(word: str, known: set[str]) -> str:
    """A text to append to the problem of an unknown word: a similar known word, or all of them."""
    near = difflib.get_close_matches(word[:100], sorted(known), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""
