"""Parses YAML into a tree whose entries have line numbers and unconverted values.

A scalar keeps its text, so `yes`, `0700` and `1:30` are not converted. The reader of an entry
converts it to a port or a size. Anchors and `<<` are supported. Duplicate keys, tags, entries that
contain themselves, and files that unfold to too many entries are rejected. For any text, this
module raises only `YamlInvalid`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import yaml

CHARACTERS_MAX = 256 * 1024
ENTRIES_MAX = 20_000  # an alias counts at each use
DEPTH_MAX = 20
NOTHING = ("", "~", "null", "Null", "NULL")
PLAIN_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "merge", "value", "map", "seq")
MERGE = "<<"


class YamlInvalid(Exception):
    """The text is no valid tree; the message names the line and the remedy."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")


@dataclass(slots=True)
class YamlEntry:
    """One value of the file: at most one of `text`, `items` and `keys` is set."""

    line: int
    text: str | None = None
    items: list[YamlEntry] | None = None
    keys: dict[str, YamlEntry] | None = None
    key_lines: dict[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.text is None and self.items is None and self.keys is None


def read_tree(text: str) -> tuple[YamlEntry, list[tuple[int, str]]]:
    """The tree, and (line, problem) of each entry that was left out. Raises YamlInvalid."""
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
        raise YamlInvalid(1, "is nested too deeply") from None
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
    """PyYAML's message, or a clearer one for a frequent cause."""
    problem = " ".join(filter(None, (error.context, error.problem)))
    if "'\\t'" in problem or "\\t" in problem:
        return "a tab is used for indentation: indent with spaces"
    if "expected a single document" in problem:
        return "a second document begins (---): one file describes one deployment"
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
            self.problems.append((line, "<< takes a mapping, an alias of one or a list of them"))
            return []
        return [self.entry(node, depth + 1) for node in nodes]
