"""The form of an answer that a request asks for: a schema, choices, a pattern or a grammar. Pure.

    field                                       the answer is
    response_format                             free text, any JSON object, or JSON of a schema
    structured_outputs, with one of             as in vLLM:
      json, json_object                         JSON of a schema, any JSON object
      regex, choice, grammar                    a match, one of the texts, a text of the grammar
    guided_json, _regex, _choice, _grammar      older names of the same in vLLM

Choices become a regular expression. The conductor checks schemas, expressions and grammars. Not
here: forced calls (tool_use.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from backends.gateway.request.fields import Reader, as_object, as_text, bad_field, shown
from backends.gateway.request.schemas import GUIDES
from backends.tensors import AFTER_THINKING, GRAMMAR, JSON_SCHEMA, REGEX, STRUCTURAL_TAG
from backends.text.closed_schema import CLOSED_BYTES_MAX, closed

FORMATS = "type text, json_object, or json_schema with json_schema.schema"
SCHEMA_LABELS = {"name", "description", "strict"}  # keys beside `schema` that have no effect
ANY_OBJECT = '{"type":"object"}'
OF_PATTERNS = re.compile(r"[\\.+*?()|\[\]{}^$]")  # characters with a meaning in an expression


class AnswerForm(NamedTuple):
    """The form of an answer."""

    field: str  # path of the client's field
    kind: str  # JSON_SCHEMA, REGEX or GRAMMAR of tensors.py
    text: str  # the schema, expression or grammar; "": the answer is free text

    @property
    def inputs(self) -> dict[str, str]:
        if self.kind == JSON_SCHEMA:
            return {"guided_json": self.text}
        return {"guided_decoding_guide_type": self.kind, "guided_decoding_guide": self.text}

    def after_thinking(self, begin: str, end: str) -> AnswerForm:
        """The form of an answer that follows this form behind its thinking. `begin`, `end`: the
        marks; `begin` is "" if the prompt has it. Raises HttpRefusal for a grammar."""
        if self.kind not in (JSON_SCHEMA, REGEX):
            if self.kind == STRUCTURAL_TAG:  # free text, which the thinking is too
                return self
            what = (
                f"{self.field} cannot follow the thinking of this model; send a schema or regex, "
                'or chat_template_kwargs {"enable_thinking": false} if its template has this'
            )
            raise bad_field(self.field, what, code="unsupported")
        given = "schema" if self.kind == JSON_SCHEMA else "pattern"
        body = msgspec.Raw(self.text.encode()) if given == "schema" else self.text
        tag = msgspec.json.encode({"begin": begin, "end": end, given: body})
        return AnswerForm(self.field, AFTER_THINKING, tag.decode())


def only_form(forms: Iterable[AnswerForm]) -> AnswerForm | None:
    """The only form that is not free text. Raises HttpRefusal for several."""
    first, *others = [each for each in forms if each.text] or [None]
    if first is not None and others:
        what = f"{first.field} and {others[0].field} exclude each other; send one of them"
        raise bad_field(first.field, what)
    return first


def read_format(value: object, name: str = "response_format") -> AnswerForm:
    rest = dict(as_object(name, value))
    kind, wrapped = rest.pop("type", None), rest.pop("json_schema", None)
    if rest:
        key = next(iter(rest))
        raise bad_field(f"{name}.{key[:64]}", f"{name} has {shown(key)}; known: {FORMATS}")
    if kind == "json_schema":
        found = dict(as_object(f"{name}.json_schema", wrapped))
        given = found.pop("schema", None)
        if unknown := found.keys() - SCHEMA_LABELS:
            key = min(unknown)
            raise bad_field(f"{name}.json_schema.{key[:64]}", f"{name} has {shown(key)}")
        schema = as_object(f"{name}.json_schema.schema", given)
        return AnswerForm(name, JSON_SCHEMA, _closed(schema))
    if wrapped is not None or kind not in ("text", "json_object"):
        raise bad_field(f"{name}.type", f"{name} is {shown(value)}; send {FORMATS}")
    return AnswerForm(name, JSON_SCHEMA, ANY_OBJECT if kind == "json_object" else "")


def read_structured(value: object, name: str = "structured_outputs") -> AnswerForm:
    # vLLM's own clients send its options as false.
    given = {key: each for key, each in as_object(name, value).items() if each not in (None, False)}
    for key in given:
        if key not in _KINDS:
            what = f"{name} has {shown(key)}, which is not supported; send {', '.join(_KINDS)}"
            raise bad_field(f"{name}.{key[:64]}", what)
    if len(given) != 1:
        what = f"{name} has {len(given)} of {', '.join(_KINDS)}; send exactly one"
        raise bad_field(name, what)
    ((key, each),) = given.items()
    return _read(key, f"{name}.{key}", each)


def _read(key: str, name: str, value: object) -> AnswerForm:
    kind, read = _KINDS[key]
    text = read(name, value)
    if not text:
        raise bad_field(name, f"{name} is empty; leave it out")
    return AnswerForm(name, kind, text)


def _schema(name: str, value: object) -> str:
    """The text of a schema that is an object or text itself. The conductor checks it."""
    if isinstance(value, str):
        text = value
        with suppress(ValueError, RecursionError):
            value = msgspec.json.decode(text)
        if not isinstance(value, Mapping):
            return text
    elif not isinstance(value, Mapping):
        raise bad_field(name, f"{name} is {shown(value)}; send a JSON schema")
    return _closed(value)


def _closed(schema: Mapping[str, Any]) -> str:
    text = msgspec.json.encode(schema)
    return (msgspec.json.encode(closed(schema)) if len(text) <= CLOSED_BYTES_MAX else text).decode()


def _any_object(name: str, value: object) -> str:
    if value is not True:
        raise bad_field(name, f"{name} is {shown(value)}; send true")
    return ANY_OBJECT


def _choices(name: str, value: object) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise bad_field(name, f"{name} is {shown(value)}; send a list of strings")
    texts = (OF_PATTERNS.sub(r"\\\g<0>", each) for each in value)
    return f"({'|'.join(texts)})"


_KINDS: Mapping[str, tuple[str, Callable[[str, Any], str]]] = {
    "json": (JSON_SCHEMA, _schema),
    "regex": (REGEX, as_text),
    "choice": (REGEX, _choices),
    "grammar": (GRAMMAR, as_text),
    "json_object": (JSON_SCHEMA, _any_object),
}
READERS: Mapping[str, Reader] = {  # kind of a field -> its reader
    "format": read_format,
    "guide": read_structured,
    **{f"guided_{key}": partial(_read, key, f"guided_{key}") for key in GUIDES},
}
