"""JSON schemas as clients could send them: a strategy of ours over every keyword, known or not.

Most can be followed. Some have a keyword that is refused, or contradict themselves, so whoever uses
this must take both: a refusal that names a keyword, and answers that validate.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(
    ["a", "b", "ab", "name", "größe", "x y", 'q"', "back\\slash", "new\nline", ""]
)
TEXTS = st.text(st.sampled_from('ab01 "\\é🙂\n/-'), max_size=6)
PATTERNS = st.sampled_from(
    ["^a+$", "[0-9]{2,4}", "^(yes|no)$", "b", "^[^x]{1,5}$", "é", "^\\d+-\\w$"]
)
FORMATS = st.sampled_from(["date", "time", "uuid", "email", "ipv4", "hostname"])
SMALL = st.integers(-20, 20)
VALUES = st.recursive(
    st.none() | st.booleans() | SMALL | st.sampled_from([0.5, -1.25, 1e3]) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
REFUSED: list[dict[str, Any]] = [
    {"not": {"type": "null"}},
    {"uniqueItems": True},
    {"contains": {"const": 1}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"minProperties": 3},
    {"propertyNames": {"pattern": "^a"}},
    {"dependentRequired": {"a": ["b"]}},
    {"multipleOf": 0.1},
    {"items": [{"type": "null"}]},
    {"$ref": "http://localhost/x"},
    {"unevaluatedProperties": False},
    {"minimun": 3},
    {"format": "no-such-format"},
    {"pattern": "(?=a)b"},
    {"type": "float"},
    {"x-guidance": {"lenient": True}},
]


def bounds(low: str, high: str, numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Of both, some or none; sometimes they contradict each other."""
    return st.fixed_dictionaries({}, optional={low: numbers, high: numbers})


STRINGS = st.one_of(
    bounds("minLength", "maxLength", st.integers(0, 8)),
    st.fixed_dictionaries({"pattern": PATTERNS}),
    st.fixed_dictionaries({"format": FORMATS}),
    st.fixed_dictionaries({"pattern": PATTERNS, "maxLength": st.integers(3, 8)}),
).map(lambda parts: {"type": "string", **parts})
NUMBERS = st.one_of(
    bounds("minimum", "maximum", SMALL),
    bounds("exclusiveMinimum", "exclusiveMaximum", SMALL),
    bounds("minimum", "maximum", st.sampled_from([-2.5, 0.25, 7.125])),
    st.fixed_dictionaries({"multipleOf": st.integers(1, 7)}, optional={"maximum": SMALL}),
).flatmap(lambda parts: st.sampled_from(["integer", "number"]).map(lambda t: {"type": t, **parts}))
LEAVES: st.SearchStrategy[Any] = st.one_of(
    STRINGS,
    NUMBERS,
    STRINGS,
    NUMBERS,
    st.sampled_from(["null", "boolean", "integer", "number"]).map(lambda name: {"type": name}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.just({"type": ["string", "null"]}),
    st.just({"$ref": "#/$defs/shared"}),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [name for name in properties if draw(st.booleans())]
    extra = draw(st.sampled_from(["closed", "closed", "open", "typed", "patterns", "bounded"]))
    if extra in ("closed", "patterns"):
        schema["additionalProperties"] = False
    if extra == "typed":
        schema["additionalProperties"] = draw(inner)
    if extra == "patterns":
        schema["patternProperties"] = {
            draw(st.sampled_from(["^p_", "_n$", "^[0-9]+$"])): draw(inner)
        }
    if extra == "bounded":
        schema["maxProperties"] = draw(st.integers(0, 4))
        schema["minProperties"] = len(schema["required"])
    if extra == "open" and not schema["required"]:
        schema["minProperties"] = draw(st.integers(0, 1))
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "maxItems": draw(st.integers(0, 4))}
    if draw(st.booleans()):
        schema["items"] = draw(inner)
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    return schema


def joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda parts: {"anyOf": parts}),
        several.map(lambda parts: {"oneOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
    )


NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(objects(inner), objects(inner), arrays(inner), joined(inner)),
    max_leaves=5,
)
DEFS = {
    "shared": {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/shared"}, "n": {"type": "integer"}},
        "additionalProperties": False,
    }
}


def _as_of_old(schema: Any) -> Any:
    """The same, said as drafts before 2019-09 say it; exclusive bounds as draft-04's."""
    if isinstance(schema, list):
        return [_as_of_old(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    old = {name: _as_of_old(part) for name, part in schema.items()}
    if isinstance(old.get("prefixItems"), list):
        if "items" in old:
            old["additionalItems"] = old["items"]
        old["items"] = old.pop("prefixItems")
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if isinstance(old.get(exclusive), int | float):
            old |= {bound: old[exclusive], exclusive: True}
    return old


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """One of eight has a keyword at its top that is refused, one of seven is of an old draft."""
    schema = {**draw(NESTED), "$defs": DEFS, "title": "of a test"}
    if draw(st.integers(0, 7)) == 7:
        schema |= draw(st.sampled_from(REFUSED))
    elif draw(st.integers(0, 5)) == 5:
        schema = _as_of_old(schema) | {"$schema": "http://json-schema.org/draft-04/schema#"}
    return schema
