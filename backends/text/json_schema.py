"""Which JSON schemas an answer can be held to: whatever is in the way, by the keyword's name.

A keyword that would be left out silently makes answers that do not validate, so one that is not
known here is refused, also a misspelt one; annotations and `x-...` mean nothing and pass. Refused
although the grammar (guides.py) would take them, because what it makes of them need not validate:

* `minProperties` above 1 and the number of `required`: keys that are not named may come twice;
* `multipleOf` of a fraction: 0.3 / 0.1 is not 3 in the floats of a validator;
* `prefixItems` in schemas of a draft before 2020-12, which do not know it;
* beside a `oneOf`, what an older draft passes over: `const` before draft-06, and up to draft-07
  whatever stands beside a `$ref`. Elsewhere an answer that keeps to it as well is none the worse;
* more parts in one place than a compiler gets through in a second (schema_size.py).

The grammar reads the newest draft. What older ones say otherwise (`items` and `additionalItems` of
tuples, `exclusiveMinimum` true) is said in its words to it. What only its compiler finds (two types
at once, look-ahead in a pattern) it says itself.
Not here: the grammar and its state (guides.py).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from backends.text.schema_size import size_problems

DEPTH_MAX = 60
PROBLEMS_MAX = 5
MULTIPLE_MAX = 1_000  # a grammar has a state for each remainder: a million take seconds
DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
OLDEST_DRAFT, NEWEST_DRAFT = DRAFTS[0], DRAFTS[-1]
IGNORE_BESIDE_REF = DRAFTS[:3]
BESIDE_REF = {"$ref", "$schema", "$defs", "definitions"}  # mean the same with a $ref or without

ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$id",
    "contentEncoding",
    "contentMediaType",
}
SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
SCHEMAS_IN_A_LIST = {"anyOf", "oneOf", "allOf", "prefixItems"}
ONE_SCHEMA = {"items", "additionalProperties", "additionalItems"}
WHOLE_NUMBERS = {
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
BOUNDS = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
TEXTS = {"pattern", "format"}
OTHERS = {"type", "enum", "const", "required", "multipleOf", "uniqueItems", "$ref", "$schema"}
KEYWORDS = (
    SCHEMAS_BY_NAME | SCHEMAS_IN_A_LIST | ONE_SCHEMA | WHOLE_NUMBERS | NUMBERS | TEXTS | OTHERS
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Of JSON Schema, and not supported.
UNSUPPORTED = {
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$anchor",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
    "contentSchema",
}


def read_schema(text: str) -> tuple[dict[str, Any], list[str]]:
    """(The schema, []) or ({}, what is in the way of following it)."""
    try:
        schema = json.loads(text, parse_constant=_no_number)
        json.dumps(schema, allow_nan=False)
        depth = _depth(schema)
    except (ValueError, RecursionError) as error:
        return {}, [f"it is not valid JSON: {error}"]
    if not isinstance(schema, dict):
        return {}, ['it is no JSON object; send a schema like {"type": "object"}']
    if depth > DEPTH_MAX:
        return {}, [f"it is nested {depth} deep; use at most {DEPTH_MAX}"]
    problems = list(_Walk(schema).of(schema, "#")) or size_problems(schema)
    more = len(problems) - PROBLEMS_MAX
    if more > 0:
        problems = [*problems[:PROBLEMS_MAX], f"and {more} more"]
    return ({}, problems) if problems else (schema, [])


def constraints_of(schema: Any) -> Any:
    """The schema in the newest draft's words and without what constrains nothing, for the grammar:
    it refuses `uniqueItems` false, and has options of its own among the annotations."""
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword in schema:
        if keyword not in KEYWORDS or keyword in ("uniqueItems", "$schema"):
            continue
        parts = [(name, constraints_of(part)) for name, part in _parts(keyword, schema[keyword])]
        if keyword in SCHEMAS_BY_NAME:
            kept[keyword] = dict(parts)
        elif isinstance(schema[keyword], list) and parts:
            kept[keyword] = [part for _, part in parts]
        else:
            kept[keyword] = parts[0][1] if parts else schema[keyword]
    return _in_new_words(kept, isinstance(schema.get("items"), list))


def _in_new_words(kept: dict[str, Any], is_tuple: bool) -> dict[str, Any]:
    """What only drafts before the newest one say."""
    rest = kept.pop("additionalItems", True)
    if is_tuple:
        kept["prefixItems"], kept["items"] = kept["items"], rest
    for bound, exclusive in BOUNDS.items():
        if isinstance(kept.get(exclusive), bool) and kept.pop(exclusive) and bound in kept:
            kept[exclusive] = kept.pop(bound)
    return kept


def keywords_in(schema: Any) -> set[str]:
    """Of those that constrain: what a schema, with all its parts, says."""
    if not isinstance(schema, dict):
        return set()
    own = schema.keys() & KEYWORDS
    parts = [part for keyword in own for _, part in _parts(keyword, schema[keyword])]
    return own.union(*map(keywords_in, parts))


def _parts(keyword: str, value: Any) -> list[tuple[Any, Any]]:
    """(name or index in the value, or None: all of it; schema) of each schema in there."""
    if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
        return list(value.items())
    if keyword in SCHEMAS_IN_A_LIST | {"items"} and isinstance(value, list):
        return list(enumerate(value))
    return [(None, value)] if keyword in ONE_SCHEMA else []


def _places(schema: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of the schema and all its parts: what a reference may point to."""
    yield where
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        for name, part in _parts(keyword, value):
            yield from _places(part, (*where, keyword, *([] if name is None else [str(name)])))


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _depth(value: Any) -> int:
    depth, level = 0, [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        parts = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
    return depth


class _Walk:
    """Through one schema and all its parts; what it says of the whole holds for the parts."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self._places = set(_places(whole))
        self._has_cases = "oneOf" in keywords_in(whole)  # of which only one may hold
        self._multiple_of = 1  # of all parts, which may meet in one number
        said = str(whole.get("$schema", NEWEST_DRAFT))
        self._draft = next((draft for draft in DRAFTS if draft in said), NEWEST_DRAFT)

    def of(self, schema: Any, where: str) -> Iterator[str]:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            yield f"{where} must be a schema: an object, true or false"
            return
        for keyword, value in schema.items():
            if self._is_annotation(keyword, where):
                continue
            problem = self._value(keyword, value, schema)
            if problem:
                yield f"{keyword} at {where}: {problem}"
            else:
                for name, part in _parts(keyword, value):
                    below = "" if name is None else f"/{_shown(str(name))}"
                    yield from self.of(part, f"{where}/{keyword}{below}")

    def _is_annotation(self, keyword: str, where: str) -> bool:
        if keyword == "id":  # the older name of $id
            return self._draft == OLDEST_DRAFT and where == "#"
        return keyword in ANNOTATIONS and not (keyword == "$id" and where != "#")

    def _value(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> str:
        """What is wrong with it there, or nothing."""
        if keyword not in KEYWORDS:
            return _unknown(keyword)
        if keyword in SCHEMAS_BY_NAME:
            return "" if isinstance(value, dict) else "it must be an object of schemas"
        if keyword in SCHEMAS_IN_A_LIST:
            if keyword == "prefixItems" and self._draft != NEWEST_DRAFT:
                return f"it means nothing in {self._draft}"
            return "" if isinstance(value, list) and value else "it must be a list of schemas"
        if keyword in ONE_SCHEMA:
            return self._one_schema(keyword, value)
        if keyword in WHOLE_NUMBERS:
            return _whole_number(keyword, value, schema)
        if keyword in BOUNDS.values() and self._draft == OLDEST_DRAFT:
            is_good = isinstance(value, bool)
            return "" if is_good else f"it must be true or false in {self._draft}"
        if keyword in NUMBERS:
            return "" if _is_number(value) else "it must be a number"
        if keyword in TEXTS:
            return "" if isinstance(value, str) else "it must be a string"
        if self._has_cases and self._passes_over(keyword, schema):
            return f"with oneOf somewhere it is refused, as {self._draft} passes over it"
        return self._other(keyword, value)

    def _passes_over(self, keyword: str, schema: Mapping[str, Any]) -> bool:
        """Whether the schema's draft does not mind this keyword, or what stands beside it."""
        if keyword == "$ref" and self._draft in IGNORE_BESIDE_REF:
            return bool(schema.keys() & KEYWORDS - BESIDE_REF)
        return keyword == "const" and self._draft == OLDEST_DRAFT

    def _one_schema(self, keyword: str, value: Any) -> str:
        """What is wrong with the list of it, or with the keyword; it is looked at as a part."""
        if self._draft != NEWEST_DRAFT:
            return ""
        if keyword == "additionalItems":
            return f"it means nothing in {NEWEST_DRAFT}; use items"
        return "use prefixItems for a list" if isinstance(value, list) else ""

    def _multiple(self, value: Any) -> str:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return "only whole numbers above 0 are supported"
        self._multiple_of = math.lcm(self._multiple_of, value)
        is_small = self._multiple_of <= MULTIPLE_MAX
        return "" if is_small else f"all of them together may be {MULTIPLE_MAX} at most"

    def _other(self, keyword: str, value: Any) -> str:
        match keyword:
            case "type":
                types = value if isinstance(value, list) and value else [value]
                is_good = all(isinstance(each, str) and each in TYPES for each in types)
                return "" if is_good else f"use some of {', '.join(TYPES)}"
            case "enum":
                is_good = isinstance(value, list) and value
                return _control_characters(value) if is_good else "it must be a list of values"
            case "const":
                return _control_characters(value)
            case "required":
                is_good = isinstance(value, list) and all(isinstance(name, str) for name in value)
                return "" if is_good else "it must be a list of names"
            case "multipleOf":
                return self._multiple(value)
            case "uniqueItems":
                return "" if value is False else "it is not supported"
            case "$ref":
                return self._reference(value)
            case "$schema":
                is_good = isinstance(value, str) and any(draft in value for draft in DRAFTS)
                return "" if is_good else f"use a draft of {', '.join(DRAFTS)}"
        return ""

    def _reference(self, value: Any) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            return "only references into the schema itself (#/...) are supported"
        parts = [part.replace("~1", "/").replace("~0", "~") for part in value.split("/")[1:]]
        return "" if tuple(parts) in self._places else f"there is no schema {_shown(value)}"


def _whole_number(keyword: str, value: Any, schema: Mapping[str, Any]) -> str:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return "it must be a whole number, 0 or more"
    if keyword == "minProperties" and value > max(1, _distinct(schema.get("required"))):
        return f"{value} is not supported; name the properties in required instead"
    return ""


def _distinct(names: Any) -> int:
    return len({str(name) for name in names}) if isinstance(names, list) else 0


def _control_characters(value: Any) -> str:
    """The grammar writes no escape of a number, so these could not be written at all."""
    is_good = not re.search(r"\\u00[01]", json.dumps(value, ensure_ascii=False))
    return "" if is_good else "control characters are not supported"


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _unknown(keyword: str) -> str:
    if keyword.startswith("x-") and keyword != "x-guidance":  # that one is the grammar's own
        return ""
    if keyword in UNSUPPORTED or keyword in ANNOTATIONS:
        return "this keyword is not supported"
    near = difflib.get_close_matches(keyword[:64], KEYWORDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"this is no keyword that is known here{hint}"


def _shown(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:40]}..."
