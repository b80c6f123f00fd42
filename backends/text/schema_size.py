"""Limits on a JSON schema, so that compiling its grammar takes at most about a second.

A running compilation cannot be stopped. Almost every schema that fits into a request compiles in
milliseconds, or the compiler rejects it. The limits are for these exceptions:

* Several patterns and formats hold for one string, through `allOf` or `$ref`. The compiler
  multiplies their automata, so each further pattern triples the time.
* An object has many names. The compiler compares name patterns with each other and with names.
* Parts are deeply nested, or references form a long chain. The compiler recurses into all of them,
  and a stack overflow kills the process.

The counts are upper bounds. All parts of an `allOf` count as if they constrained the same strings.

A grammar consists of nodes of about 8 KB. If several parts of a schema hold for one value, the
compiler makes a node for each combination of their alternatives. Example: 30 properties, each an
`allOf` of three `anyOf` of four objects with a property, are 11,520 nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

PATTERNS_TOGETHER_MAX = 8  # patterns and formats that may hold for one string
NAMES_COMPARED_MAX = 10_000  # pairs of names and name patterns of one object
NAMES_MAX = 1_000  # properties of one object
LEVELS_MAX = 150  # nesting; the compiler's stack overflows at 400 to 2,000 levels
NODES_MAX = 10_000  # nodes of one schema; this many need 80 MB and compile in 0.25 s
NODES_COUNTED_MAX = 10**9  # larger counts of nodes are cut to this number
BOUNDS = (  # each of these keywords adds one node
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
)


class _Load(NamedTuple):
    """Numbers of constraints that may hold for one value."""

    patterns: int = 0  # `pattern` and `format`
    name_patterns: int = 0  # entries of `patternProperties`
    names: int = 0  # entries of `properties`

    def joined(self, other: _Load) -> _Load:
        return _Load(*(one + another for one, another in zip(self, other, strict=True)))


class _Size(NamedTuple):
    """Upper bounds of the constraints that a schema sets."""

    here: _Load = _Load()  # for the value that the schema describes
    within: _Load = _Load()  # for any one value that is nested in that value

    def joined(self, other: _Size) -> _Size:
        return _Size(self.here.joined(other.here), self.within.joined(other.within))


NOTHING = _Size()


class _TooLarge(Exception):
    """A limit is exceeded. The message names the keyword, its path and the problem."""


def size_problems(schema: dict[str, Any]) -> list[str]:
    """[text of the first exceeded limit], or []. json_schema.py must have found no problem."""
    try:
        _Sizes(schema).of(schema, "#")
    except _TooLarge as problem:
        return [str(problem)]
    if (nodes := schema_nodes(schema)) > NODES_MAX:
        return [
            f"the schema has {nodes:,} parts, with all combinations of its alternatives (allOf, "
            f"$ref, anyOf); use at most {NODES_MAX:,}"
        ]
    return []


def schema_nodes(schema: dict[str, Any]) -> int:
    """Number of grammar nodes, at most NODES_COUNTED_MAX. All other limits must hold."""
    return _Nodes(schema).all()


class _Sizes:
    """Sizes of one schema and all its parts."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole
        self._targets: dict[str, _Size] = {}  # reference -> size; NOTHING during its visit
        self._heights: dict[str, int] = {}  # visited reference -> levels below it
        self._level = self._deepest = 0  # current level; deepest level of the visit so far

    def of(self, schema: Any, where: str) -> _Size:
        if not isinstance(schema, dict):
            return NOTHING
        self._level += 1
        self._reach(self._level, where)
        size = self._of(schema, where)
        self._level -= 1
        return size

    def _of(self, schema: dict[str, Any], where: str) -> _Size:
        names, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        here = _Load(len(schema.keys() & {"pattern", "format"}), len(patterns), len(names))
        within = self._largest(names.items(), f"{where}/properties")
        within = within.joined(self._largest(patterns.items(), f"{where}/patternProperties"))
        rest = [within]
        for keyword in ("items", "prefixItems", "additionalItems", "additionalProperties"):
            value = schema.get(keyword)
            parts = enumerate(value) if isinstance(value, list) else [("", value)]
            rest.append(self._largest(parts, f"{where}/{keyword}"))
        size = _Size(here, _largest(rest))
        for part in self._parts(schema, where):
            size = size.joined(part)
        self._check(size, where)
        return size

    def _parts(self, schema: dict[str, Any], where: str) -> Iterator[_Size]:
        """Sizes of the parts that constrain the same value as the schema."""
        for index, part in enumerate(schema.get("allOf", [])):
            yield self.of(part, f"{where}/allOf/{index}")
        for keyword in ("anyOf", "oneOf"):
            sizes = [
                self.of(part, f"{where}/{keyword}/{index}")
                for index, part in enumerate(schema.get(keyword, []))
            ]
            yield _Size(
                _largest(size.here for size in sizes), _largest(size.within for size in sizes)
            )
        if "$ref" in schema:
            yield self._target(schema["$ref"])

    def _target(self, reference: str) -> _Size:
        """The size of a target. A target is visited once, but its depth counts on each path."""
        if reference in self._targets:
            self._reach(self._level + self._heights.get(reference, 0), reference)
            return self._targets[reference]
        self._targets[reference] = NOTHING
        before, self._deepest = self._deepest, self._level
        self._targets[reference] = self.of(_found(self._whole, reference), reference)
        self._heights[reference] = self._deepest - self._level
        self._deepest = max(before, self._deepest)
        return self._targets[reference]

    def _reach(self, level: int, where: str) -> None:
        if level > LEVELS_MAX:
            what = f"parts and references are nested more than {LEVELS_MAX} levels deep"
            raise _TooLarge(f"$ref at {where}: {what}")
        self._deepest = max(self._deepest, level)

    def _largest(self, parts: Iterable[tuple[Any, Any]], where: str) -> _Load:
        """The largest load on any value in these parts."""
        sizes = [self.of(part, f"{where}/{name}") for name, part in parts]
        return _largest([load for size in sizes for load in size])

    def _check(self, size: _Size, where: str) -> None:
        for load in size:
            compared = load.name_patterns * (load.name_patterns + load.names)
            if load.patterns > PATTERNS_TOGETHER_MAX:
                what = f"{load.patterns} patterns and formats may hold for one string"
                raise _TooLarge(f"pattern at {where}: {what}; use at most {PATTERNS_TOGETHER_MAX}")
            if compared > NAMES_COMPARED_MAX:
                what = f"one object may have {load.name_patterns} beside {load.names} properties"
                raise _TooLarge(f"patternProperties at {where}: {what}; use fewer")
            if load.names > NAMES_MAX:
                what = f"one object may have {load.names} of them"
                raise _TooLarge(f"properties at {where}: {what}; use at most {NAMES_MAX}")


def _largest(loads: Iterable[_Load]) -> _Load:
    columns = zip(_Load(), *loads, strict=True)
    return _Load(*(max(column) for column in columns))


def steps_of(reference: str) -> Iterator[str]:
    """The names and indices from the whole schema to the target of a reference (#/...)."""
    return (step.replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:])


def _found(whole: dict[str, Any], reference: str) -> Any:
    found: Any = whole
    for name in steps_of(reference):
        found = found[int(name)] if isinstance(found, list) else found[name]
    return found


class _Shape(NamedTuple):
    """The compiled form of a schema, or of several schemas that hold for one value."""

    alternatives: int = 1  # number of alternatives, from anyOf and oneOf
    nodes: int = 0  # in all alternatives together
    children: Mapping[str, _Shape] = {}  # inner part -> upper bound of all alternatives
    is_reference: bool = False  # True: a $ref alone, which is one node until `both` merges it

    @property
    def counted(self) -> int:
        """Nodes that this shape adds to its parent."""
        return 1 if self.is_reference else self.nodes


class _Pairs:
    """Joins pairs of shapes, each pair once, because very many paths may lead to a pair.

    After NODES_MAX pairs, the schema is too large in any case. `_once` then computes no join.
    """

    def __init__(self) -> None:
        # (kind, ids of two shapes) -> the shapes, their join. Python reuses no id of a kept shape.
        self._joined: dict[tuple[str, int, int], tuple[_Shape, _Shape, _Shape]] = {}

    def both(self, one: _Shape, other: _Shape) -> _Shape:
        """Both shapes hold for a value. Each alternative of one combines with each of the other."""
        return self._once("both", self._both, one, other)

    def either(self, one: _Shape, other: _Shape) -> _Shape:
        """One of the shapes holds for a value. Returns an upper bound of both."""
        return self._once("either", self._either, one, other)

    def _once(
        self, kind: str, join: Callable[[_Shape, _Shape], _Shape], one: _Shape, other: _Shape
    ) -> _Shape:
        known = self._joined.get((kind, id(one), id(other)))
        if known is not None:
            return known[-1]
        if len(self._joined) > NODES_MAX:
            return _Shape(nodes=NODES_COUNTED_MAX)
        joined = join(one, other)
        self._joined[kind, id(one), id(other)] = (one, other, joined)
        return joined

    def _both(self, one: _Shape, other: _Shape) -> _Shape:
        alternatives = one.alternatives * other.alternatives
        nodes = one.nodes * other.alternatives + other.nodes * one.alternatives
        children = {**one.children, **other.children}
        for name in one.children.keys() & other.children.keys():
            child, another = one.children[name], other.children[name]
            children[name] = joined = self.both(child, another)
            nodes += max(0, joined.nodes - child.counted - another.counted) * alternatives
        most = NODES_COUNTED_MAX
        return _Shape(min(alternatives, most), min(nodes, most), children)

    def _either(self, one: _Shape, other: _Shape) -> _Shape:
        return _Shape(
            max(one.alternatives, other.alternatives),
            max(one.nodes, other.nodes),
            self.either_children(one.children, other.children),
            one.is_reference or other.is_reference,
        )

    def either_children(
        self, some: Mapping[str, _Shape], others: Mapping[str, _Shape]
    ) -> Mapping[str, _Shape]:
        children = {**some, **others}
        for name in some.keys() & others.keys():
            if some[name] is not others[name]:
                children[name] = self.either(some[name], others[name])
        return children


class _Nodes:
    """Counts the nodes of one schema.

    A $ref that is its schema's only keyword is one node, and its target is counted once. If other
    keywords are beside the $ref, the compiler merges a copy of the target with these keywords.
    """

    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole
        self._copied: dict[str, _Shape] = {}  # reference -> shape; _Shape() during its visit
        self._alone: dict[str, _Shape] = {}  # reference of a $ref alone -> shape
        self._pairs = _Pairs()

    def all(self) -> int:
        nodes = self._of(self._whole).nodes + sum(shape.nodes for shape in self._alone.values())
        return min(nodes, NODES_COUNTED_MAX)

    def _copy(self, reference: str) -> _Shape:
        if reference not in self._copied:
            self._copied[reference] = _Shape()
            self._copied[reference] = self._of(_found(self._whole, reference))
        return self._copied[reference]

    def _alone_at(self, reference: str) -> _Shape:
        """One shape for each target, so that `_Pairs` recognises it by its id."""
        if reference not in self._alone:
            self._alone[reference] = _Shape()  # during its visit
            self._alone[reference] = self._copy(reference)._replace(is_reference=True)
        return self._alone[reference]

    def _of(self, schema: Any) -> _Shape:
        if not isinstance(schema, dict):
            return _Shape(nodes=1)
        shape = self._own(schema)
        for part in schema.get("allOf", []):
            shape = self._pairs.both(shape, self._of(part))
        for keyword in ("anyOf", "oneOf"):
            if parts := schema.get(keyword):
                shape = self._pairs.both(shape, self._any([self._of(part) for part in parts]))
        if "$ref" in schema:
            shape = self._pairs.both(shape, self._copy(schema["$ref"]))
        return shape

    def _any(self, shapes: Sequence[_Shape]) -> _Shape:
        """The shape of an anyOf or oneOf."""
        children: Mapping[str, _Shape] = {}
        for shape in shapes:
            children = self._pairs.either_children(children, shape.children)
        alternatives = sum(shape.alternatives for shape in shapes)
        return _Shape(alternatives, sum(shape.nodes for shape in shapes), children)

    def _own(self, schema: dict[str, Any]) -> _Shape:
        """The shape of the schema's own keywords, without allOf, anyOf, oneOf and $ref."""
        children: dict[str, _Shape] = {}
        nodes = 1 + len(schema.get("enum", ())) + sum(name in schema for name in BOUNDS)
        for name, child in _children(schema):
            if isinstance(child, dict) and child.keys() == {"$ref"}:
                children[name] = self._alone_at(child["$ref"])
            else:
                children[name] = self._of(child)
            nodes += children[name].counted
        return _Shape(1, min(nodes, NODES_COUNTED_MAX), children)


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, schema) of the inner parts. Parts of equal names constrain the same inner values."""
    for keyword in ("properties", "patternProperties"):
        for name, child in schema.get(keyword, {}).items():
            yield f"{keyword}/{name}", child
    for keyword in ("items", "prefixItems", "additionalItems", "additionalProperties"):
        value = schema.get(keyword)
        parts = enumerate(value) if isinstance(value, list) else [("", value)]
        group = keyword if keyword == "additionalProperties" else "items"
        yield from ((f"{group}/{name}", part) for name, part in parts if isinstance(part, dict))
