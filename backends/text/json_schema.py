"""Checks JSON schemas for guided decoding, and reports each unsupported part by its keyword.

Ignoring a keyword would produce answers that do not validate. So every unsupported keyword is
rejected, also a misspelt one. Annotations and `x-...` keywords (except `x-guidance`) have no effect
and are accepted. The grammar compiler (guides.py) would accept the following parts, but the answers
might not validate. So this check rejects them:

* `minProperties` above both 1 and the number of `required`, as an answer may repeat a property.
* `multipleOf` of a fraction, as 0.3 / 0.1 is not 3 in a validator's floats.
* `prefixItems` in schemas of a draft before 2020-12, as the draft does not define it.
* In a schema with a `oneOf`, keywords that its draft ignores: `const` before draft-06, and up to
  draft-07 the keywords beside a `$ref`. A validator that ignores them may find two cases of the
  `oneOf` true. Without a `oneOf`, an ignored keyword only narrows the answers.

Schemas that compile for more than about a second are rejected too (schema_size.py). The compiler
follows the newest draft, so `constraints_of` translates older forms (`items` and `additionalItems`
of tuples, `exclusiveMinimum` true). It rejects further parts itself, such as look-ahead patterns.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from backends.text.schema_size import size_problems, steps_of

DEPTH_MAX = 60  # levels of nested objects and lists
PROBLEMS_MAX = 5  # listed problems of a schema; further problems are only counted
ALIKE_MIN = 0.75  # similarity of a keyword that a message suggests, from 0 to 1
MULTIPLE_MAX = 1_000  # a grammar has a state for each remainder, and a million take seconds
DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
OLDEST_DRAFT, NEWEST_DRAFT = DRAFTS[0], DRAFTS[-1]
IGNORE_BESIDE_REF = DRAFTS[:3]
BESIDE_REF = {"$ref", "$schema", "$defs", "definitions"}  # allowed beside a $ref in every draft

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
DEFINITIONS = {"$defs", "definitions"}
SCHEMAS_BY_NAME = {"properties", "patternProperties"} | DEFINITIONS
SCHEMAS_IN_A_LIST = {"anyOf", "oneOf", "allOf", "prefixItems"}
ONE_SCHEMA = {"items", "additionalProperties", "additionalItems"}
WHOLE_NUMBERS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
BOUNDS = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
TEXTS = {"pattern", "format"}
OTHERS = {"type", "enum", "const", "required", "multipleOf", "uniqueItems", "$ref", "$schema"}
KEYWORDS = (
    SCHEMAS_BY_NAME | SCHEMAS_IN_A_LIST | ONE_SCHEMA | WHOLE_NUMBERS | NUMBERS | TEXTS | OTHERS
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def read_schema(text: str) -> tuple[dict[str, Any], list[str]]:
    """Parse and check a schema. Returns (schema, []) or ({}, problems)."""
    try:
        schema = json.loads(text, parse_constant=_no_number)
        json.dumps(schema, allow_nan=False)
        depth = _depth(schema)
    except (ValueError, RecursionError) as error:
        return {}, [f"it is not valid JSON: {error}"]
    if not isinstance(schema, dict):
        return {}, ['it is not a JSON object; send a schema like {"type": "object"}']
    if depth > DEPTH_MAX:
        return {}, [f"it is nested {depth} deep; use at most {DEPTH_MAX}"]
    problems = list(_Walk(schema).of(schema, "#")) or size_problems(schema)
    more = len(problems) - PROBLEMS_MAX
    if more > 0:
        problems = [*problems[:PROBLEMS_MAX], f"and {more} more"]
    return ({}, problems) if problems else (schema, [])


def constraints_of(schema: Any) -> Any:
    """The schema for the grammar: in the newest draft, without keywords that constrain nothing.

    The grammar would reject `uniqueItems` false, and would read some annotations as options.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword in schema:
        if keyword not in KEYWORDS or keyword in ("uniqueItems", "$schema"):
            continue
        parts = [(name, constraints_of(part)) for name, part in parts_of(keyword, schema[keyword])]
        if keyword in SCHEMAS_BY_NAME:
            kept[keyword] = dict(parts)
        elif isinstance(schema[keyword], list) and parts:
            kept[keyword] = [part for _, part in parts]
        else:
            kept[keyword] = parts[0][1] if parts else schema[keyword]
    return _in_newest_draft(kept, isinstance(schema.get("items"), list))


def _in_newest_draft(kept: dict[str, Any], is_tuple: bool) -> dict[str, Any]:
    """Translate forms that only older drafts have, in place. `is_tuple`: `items` was a list."""
    rest = kept.pop("additionalItems", True)
    if is_tuple:
        kept["prefixItems"], kept["items"] = kept["items"], rest
    for bound, exclusive in BOUNDS.items():
        if isinstance(kept.get(exclusive), bool) and kept.pop(exclusive) and bound in kept:
            kept[exclusive] = kept.pop(bound)
    return kept


def keywords_in(schema: Any) -> set[str]:
    """The constraining keywords of a schema and all its parts."""
    if not isinstance(schema, dict):
        return set()
    own = schema.keys() & KEYWORDS
    parts = [part for keyword in own for _, part in parts_of(keyword, schema[keyword])]
    return own.union(*map(keywords_in, parts))


def parts_of(keyword: str, value: Any) -> list[tuple[Any, Any]]:
    """(name or index, schema) of each schema in the value; (None, value) if it is one schema."""
    if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
        return list(value.items())
    if keyword in SCHEMAS_IN_A_LIST | {"items"} and isinstance(value, list):
        return list(enumerate(value))
    return [(None, value)] if keyword in ONE_SCHEMA else []


def _places(schema: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the schema and all its parts, to which references may point."""
    yield where
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        for name, part in parts_of(keyword, value):
            yield from _places(part, (*where, keyword, *([] if name is None else [str(name)])))


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _depth(value: Any) -> int:
    depth, level = 0, [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        parts = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
    return depth


class _Walk:
    """Finds the problems of one schema and all its parts."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self._places = set(_places(whole))
        self._has_cases = "oneOf" in keywords_in(whole)
        self._multiple_of = 1  # least common multiple of all, because all may hold for one number
        given = str(whole.get("$schema", NEWEST_DRAFT))
        self._draft = next((draft for draft in DRAFTS if draft in given), NEWEST_DRAFT)

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
                for name, part in parts_of(keyword, value):
                    below = "" if name is None else f"/{_shown(str(name))}"
                    yield from self.of(part, f"{where}/{keyword}{below}")

    def _is_annotation(self, keyword: str, where: str) -> bool:
        if keyword == "id":  # the older name of $id
            return self._draft == OLDEST_DRAFT and where == "#"
        return keyword in ANNOTATIONS and not (keyword == "$id" and where != "#")

    def _value(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> str:
        """The problem of the keyword's value, or ""."""
        if keyword not in KEYWORDS:
            return _unknown(keyword)
        if keyword in SCHEMAS_BY_NAME:
            return "" if isinstance(value, dict) else "it must be an object of schemas"
        if keyword in SCHEMAS_IN_A_LIST:
            if keyword == "prefixItems" and self._draft != NEWEST_DRAFT:
                return f"it is not defined in {self._draft}"
            return "" if isinstance(value, list) and value else "it must be a list of schemas"
        if keyword in ONE_SCHEMA:
            return self._one_schema(keyword, value)
        if keyword in WHOLE_NUMBERS:
            return _whole_number(keyword, value, schema)
        if keyword in BOUNDS.values() and self._draft == OLDEST_DRAFT:
            return "" if isinstance(value, bool) else f"it must be true or false in {self._draft}"
        if keyword in NUMBERS:
            return "" if _is_number(value) else "it must be a number"
        if keyword in TEXTS:
            return "" if isinstance(value, str) else "it must be a string"
        if self._has_cases and self._is_ignored(keyword, schema):
            return f"it is not supported with oneOf, as {self._draft} ignores it"
        return self._other(keyword, value)

    def _is_ignored(self, keyword: str, schema: Mapping[str, Any]) -> bool:
        """Whether the schema's draft ignores this keyword, or the keywords beside it."""
        if keyword == "$ref" and self._draft in IGNORE_BESIDE_REF:
            return bool(schema.keys() & KEYWORDS - BESIDE_REF)
        return keyword == "const" and self._draft == OLDEST_DRAFT

    def _one_schema(self, keyword: str, value: Any) -> str:
        """The problem of a keyword with one schema, or "". Does not check that schema itself."""
        if self._draft != NEWEST_DRAFT:
            return ""
        if keyword == "additionalItems":
            return f"it is not defined in {NEWEST_DRAFT}; use items"
        return "use prefixItems for a list" if isinstance(value, list) else ""

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
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    return "only whole numbers above 0 are supported"
                self._multiple_of = math.lcm(self._multiple_of, value)
                if self._multiple_of > MULTIPLE_MAX:
                    return f"the least common multiple of all values may be at most {MULTIPLE_MAX}"
            case "uniqueItems":
                return "" if value is False else "it is not supported"
            case "$ref":
                if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                    return "only references into the schema itself (#/...) are supported"
                is_there = tuple(steps_of(value)) in self._places
                return "" if is_there else f"there is no schema {_shown(value)}"
            case "$schema":
                is_good = isinstance(value, str) and any(draft in value for draft in DRAFTS)
                return "" if is_good else f"use a draft of {', '.join(DRAFTS)}"
        return ""


def _whole_number(keyword: str, value: Any, schema: Mapping[str, Any]) -> str:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return "it must be a whole number, 0 or more"
    if keyword == "minProperties" and value > max(1, _distinct(schema.get("required"))):
        return f"{value} is not supported; name the properties in required instead"
    return ""


def _distinct(names: Any) -> int:
    return len({str(name) for name in names}) if isinstance(names, list) else 0


def _control_characters(value: Any) -> str:
    """The problem of a value with control characters, or "". The grammar allows no \\u escapes."""
    is_good = not re.search(r"(?<!\\)(\\\\)*\\u00[01]", json.dumps(value, ensure_ascii=False))
    return "" if is_good else "control characters are not supported"


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _unknown(keyword: str) -> str:
    if keyword.startswith("x-") and keyword != "x-guidance":  # x-guidance sets grammar options
        return ""
    near = difflib.get_close_matches(keyword[:64], KEYWORDS, n=1, cutoff=ALIKE_MIN)
    return "this keyword is not supported" + (f"; did you mean {near[0]}?" if near else "")


def _shown(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:40]}..."
