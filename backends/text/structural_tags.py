"""Structural tags: answers that follow a schema in a part of their text. Pure.

    STRUCTURAL_TAG, in vLLM's form
        {"triggers": [TRIGGER], "structures": [{"begin": ..., "schema": ..., "end": ...}]}
        The answer is free text. After each TRIGGER, the rest of `begin`, JSON of the schema and
        `end` follow. `begin` starts with TRIGGER.
    AFTER_THINKING
        {"begin": BEGIN, "end": END, "schema": ...}, or "pattern": a regular expression
        The answer is free text, then END, then JSON of the schema, or a match. If BEGIN is not "",
        the answer begins with BEGIN, or it has no thinking.

The grammars are in Lark. A model may have special tokens for the marks, which no text matches, so a
grammar names them by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.errors import InvalidRequest
from backends.tensors import AFTER_THINKING, STRUCTURAL_TAG, guide_name

ANY_TEXT = "/(.|\\n)+/"
# Between the thinking and the answer. Models write an empty line there.
GAP = "/[ \\t\\r\\n]{1,4}/"
FORMS = {
    STRUCTURAL_TAG: "triggers, and of one structure with begin, schema and end",
    AFTER_THINKING: "begin, end, and either schema or pattern",
}
SpecialIds = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CallTag:
    trigger: str
    begin: str  # starts with `trigger`
    schema: Any
    end: str

    def grammar(self, schema: Any, special_ids: SpecialIds) -> str:
        """The grammar in Lark. `schema`: as llguidance gets it. Other special tokens may be
        anywhere in the free text."""
        token = f"<[{special_ids[self.trigger]}]> | " if self.trigger in special_ids else ""
        begin = _written(self.begin[len(self.trigger) :], special_ids)
        body = f"{begin} %json {json.dumps(schema)} {_written(self.end, special_ids)}"
        return f"""%llguidance {{}}
start: call* text
call: text ({token}trigger) {body}
text: (TEXT{_others(special_ids, self.trigger)})*
TEXT: {ANY_TEXT}
trigger[lazy]: /(.|\\n)*/ {json.dumps(self.trigger)}
"""


@dataclass(frozen=True, slots=True)
class ThinkingTag:
    begin: str
    end: str
    schema: Any
    pattern: str  # "": the answer follows `schema`

    def grammar(self, schema: Any, special_ids: SpecialIds) -> str:
        """As of CallTag."""
        answer = f"/{_unslashed(self.pattern)}/" if self.pattern else f"%json {json.dumps(schema)}"
        begin = f"({_written(self.begin, special_ids)} thinking)?" if self.begin else "thinking"
        rules = [f"start: {begin} answer", f"answer: GAP? ({answer})", f"GAP: {GAP}"]
        if self.end in special_ids:
            rules += [f"thinking: text <[{special_ids[self.end]}]>"]
            rules += [f"text: (TEXT{_others(special_ids, self.end)})*", f"TEXT: {ANY_TEXT}"]
        else:
            rules += [f"thinking[lazy]: /(.|\\n)*/ {json.dumps(self.end)}"]
        return "\n".join(["%llguidance {}", *rules, ""])


def read_tag(kind: str, text: str) -> CallTag | ThinkingTag:
    """The tag of this JSON. `kind`: one of TAGS. Raises InvalidRequest."""
    try:
        given = json.loads(text)
        return _call_tag(given) if kind == STRUCTURAL_TAG else _thinking_tag(given)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        what = FORMS[kind]
        raise InvalidRequest(f"{guide_name(kind)}: it is not JSON of {what}") from None


def _call_tag(given: Any) -> CallTag:
    (each,) = given["structures"]
    begin, marks = each["begin"], given["triggers"]
    trigger = next(mark for mark in marks if mark and begin.startswith(mark))
    return CallTag(trigger, begin, each["schema"], "" + each["end"])


def _thinking_tag(given: Any) -> ThinkingTag:
    begin, end = "" + given["begin"], "" + given["end"]
    if not end or len({"schema", "pattern"} & given.keys()) != 1:
        raise ValueError(end)
    if "schema" in given:
        return ThinkingTag(begin, end, given["schema"], "")
    return ThinkingTag(begin, end, {}, ("" + given["pattern"]) or "()")


def _written(text: str, special_ids: SpecialIds) -> str:
    """The text in Lark, with its special tokens by their ids."""
    parts = filter(None, re.split(f"({'|'.join(map(re.escape, special_ids)) or '(?!)'})", text))
    return " ".join(
        f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part) for part in parts
    )


def _others(special_ids: SpecialIds, mark: str) -> str:
    """The special tokens other than `mark`, as an alternative of a rule; "" without any."""
    ids = [str(each) for text, each in special_ids.items() if text != mark]
    return f" | <[{','.join(ids)}]>" if ids else ""


def _unslashed(pattern: str) -> str:
    """The expression between the slashes of a grammar."""
    return re.sub(
        r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.S
    )
