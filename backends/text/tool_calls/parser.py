"""Finds the tool calls in an answer while it is streamed.

The parser receives the text in pieces of any size. It returns text for the client and parts of
calls. How the text was cut into pieces changes neither the text nor the calls. The arguments of a
call are passed on as the model writes them, so they may be invalid JSON, or incomplete at the end.

Text that may begin a call is held back. If it proves not to be a call, it becomes text of the
answer. A call begins for the client when its name is known and its arguments begin. White space
beside a call is not part of the answer.

Not here: the formats (formats.py), the events for clients (gateway/answer/chat_events.py).
"""

from __future__ import annotations

import enum
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from backends.text.tool_calls.call_syntax import (
    JsonValue,
    NotACall,
    ObjectCall,
    PythonList,
    python_calls,
)
from backends.text.tool_calls.formats import Form, ToolCallFormat
from backends.text.tool_calls.requests import NAME

HEADER_CHARACTERS_MAX = 512  # a longer text without arguments is no call
NUMBERED_ID = re.compile(r"(?:functions\.)?(?P<name>.+):\d+", re.DOTALL)  # kimi_k2
CLOSERS = " \t\r\n}]"  # after a call: brackets that the model wrote too much
PYTHON_BEGIN = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?", re.DOTALL)


class CallPart(NamedTuple):
    """A part of a call. The first part of each call has the name and the id, later parts only
    further text of the arguments."""

    index: int  # number of the call in the answer, from 0
    name: str
    call_id: str
    arguments: str


Part = str | CallPart  # text of the answer, or part of a call


class CallReader(Protocol):
    """Finds the calls in an answer, piece by piece."""

    def push(self, text: str) -> Sequence[Part]: ...

    def finish(self) -> Sequence[Part]: ...


class _State(enum.Enum):
    TEXT = enum.auto()
    OPENED = enum.auto()  # after an opening: a bracket or a name follows
    OBJECT = enum.auto()
    HEADER = enum.auto()
    ARGUMENTS = enum.auto()  # after a header
    PYTHON = enum.auto()
    NO_CALLS = enum.auto()  # the rest of the answer is text


class CallParser:
    """The parser of one answer. Not thread-safe."""

    def __init__(
        self,
        written: ToolCallFormat,
        names: Collection[str],
        new_id: Callable[[str, int], str],
        calls_max: int | None = None,
    ) -> None:
        """`names`: the functions of the request. `new_id`: (name, index) -> id of a call whose
        format writes no ids. `calls_max`: further calls are dropped; None: no limit."""
        self._format, self._names, self._new_id = written, frozenset(names), new_id
        self._calls_max = calls_max
        self._state = _State.TEXT
        self._rest = ""  # received and not yet processed
        self._held = ""  # of the call that is being read, until it begins for the client
        self._calls = 0
        self._is_begun = False  # the call that is being read has begun for the client
        self._in_list = False
        self._may_open_answer = written.opens_answer
        self._follows_call = False  # no text of the answer has followed the last call
        self._has_text = False
        self._space = ""  # white space that may stand beside a call
        self._object = ObjectCall()
        self._value = JsonValue()
        self._is_expression = False  # PYTHON: a function and its bracket were read
        self._list = PythonList()
        self._opening = ""  # the mark that opened the call
        self._marks = written.marks

    def push(self, text: str) -> list[Part]:
        """Parts that `text` adds."""
        self._rest += text
        return _joined(self._parts(is_last=False))

    def finish(self) -> list[Part]:
        """The parts that were held back. No push may follow."""
        return _joined(self._parts(is_last=True))

    def _parts(self, is_last: bool) -> Iterator[Part]:
        while True:
            before = self._state, len(self._rest)
            if self._state is _State.TEXT:
                yield from self._text(is_last)
            elif self._state is _State.NO_CALLS:
                yield from self._answer(self._rest)
                self._rest = ""
            else:
                yield from self._call()
            if before == (self._state, len(self._rest)):
                break
        if not is_last:
            return
        has_calls = self._in_list and self._calls > 0
        if self._held and not self._is_begun and not has_calls:  # of a list, the end is dropped
            yield from self._give_up()
            if self._rest:
                yield from self._parts(is_last=True)
                return
        if not self._follows_call:
            yield self._space

    # Text

    def _text(self, is_last: bool) -> Iterator[Part]:
        """Pass on the text before the next mark. Hold back what may be the begin of a mark."""
        text = self._rest
        if self._may_open_answer or self._follows_call:
            stripped = text.lstrip()
            if self._format.opens_answer and stripped and stripped[0] in "{[":
                self._space += text[: len(text) - len(stripped)]
                self._open("", stripped)
                return
            if stripped and self._may_open_answer:
                self._may_open_answer = False
        if self._follows_call:
            tail = text.lstrip(CLOSERS)
            if not is_last and any(m.startswith(tail) and m != tail for m in self._marks):
                return
            if is_last and not tail:
                self._rest = ""
                return
        at, mark = self._first_mark(text)
        if mark:
            if not self._follows_call or text[:at].strip(CLOSERS):
                yield from self._answer(text[:at])
            rest = text[at + len(mark) :]
            if mark in self._format.openings:
                self._open(mark, rest)
            else:
                self._rest = rest
                if mark in self._format.after:
                    self._space = ""
            return
        keep = 0 if is_last else max((overlap(text, each) for each in self._marks), default=0)
        self._rest = text[len(text) - keep :]
        yield from self._answer(text[: len(text) - keep])

    def _first_mark(self, text: str) -> tuple[int, str]:
        """(position, mark) of the first mark; (len(text), "") if there is none."""
        found = (len(text), "")
        for mark in self._marks:
            is_after = mark in self._format.after
            at = text.find(mark)
            if at < 0 or (is_after and not (self._follows_call and not text[:at].strip(CLOSERS))):
                continue
            if (at, -len(mark)) < (found[0], -len(found[1])):
                found = at, mark
        return found

    def _answer(self, text: str) -> Iterator[Part]:
        """Text of the answer, but for white space at its end, which may stand beside a call."""
        kept = text.rstrip()
        if not kept:
            self._space += text
            return
        found = self._space + kept
        yield found.lstrip() if self._follows_call and not self._has_text else found
        self._space = text[len(kept) :]
        self._follows_call, self._has_text = False, True

    # Calls

    def _open(self, opening: str, rest: str) -> None:
        self._state, self._held, self._rest = _State.OPENED, opening, rest
        self._in_list = self._may_open_answer = self._is_expression = False
        self._list, self._opening = PythonList(), opening
        if self._format.form is Form.HEADER:
            self._state = _State.HEADER
        elif self._format.form is Form.PYTHON:
            self._state = _State.PYTHON

    def _call(self) -> Iterator[Part]:
        """Process the characters of a call, until it ends or the received text ends."""
        text, self._rest = self._rest, ""
        for at, character in enumerate(text):
            if not self._is_begun:
                self._held += character
            try:
                yield from self._character(character)
            except NotACall:
                if self._is_begun:  # for example because the model forgot the last bracket
                    self._rest, self._in_list = text[at:], False
                    self._end()
                else:
                    self._rest = text[at + 1 :]
                    yield from self._give_up()
                return
            if self._state is _State.TEXT:
                self._rest = text[at + 1 :]
                return

    def _character(self, character: str) -> Iterator[Part]:
        if self._state is _State.OPENED:
            self._opened(character)
        if self._state is _State.OBJECT:
            yield from self._object_call(character)
        elif self._state is _State.HEADER:
            yield from self._header(character)
        elif self._state is _State.ARGUMENTS:
            yield from self._arguments(character)
        elif self._state is _State.PYTHON:
            yield from self._python(character)

    def _opened(self, character: str) -> None:
        """A bracket or, in formats with both forms, a name follows an opening."""
        if character in " \t\r\n" or (character == "," and self._in_list):
            return
        if character == "[" and not self._in_list:
            self._in_list = True
        elif character == "{":
            self._state, self._object = _State.OBJECT, ObjectCall()
        elif character == "]" and self._in_list and self._follows_call:
            self._in_list, self._held, self._state = False, "", _State.TEXT
        elif self._format.around_name and not self._in_list:
            self._state = _State.HEADER
        else:
            raise NotACall

    def _object_call(self, character: str) -> Iterator[Part]:
        call = self._object
        added = call.take(character)
        if call.streams or (added and self._is_begun):
            if not self._is_begun:
                self._check(call.name)
                yield from self._begin(call.name, "")
            yield from self._continue(added)
        if call.is_over:
            if not self._is_begun:
                self._check(call.name)
                if self._format.opens_answer and call.arguments is None:
                    raise NotACall
                yield from self._begin(call.name, "")
                yield from self._continue(call.arguments or "{}")
            self._end()

    def _header(self, character: str) -> Iterator[Part]:
        if character != "{":
            after_opening = self._held[len(self._opening) :]
            if len(self._held) > HEADER_CHARACTERS_MAX or self._opening in after_opening:
                raise NotACall
            return
        name = self._held[len(self._opening) : -1]
        for text in self._format.around_name:
            name = name.replace(text, "")
        name, _, call_id = name.strip().partition("[CALL_ID]")  # as some Mistral models write
        if self._format.has_ids and (found := NUMBERED_ID.fullmatch(name)):
            name, call_id = found["name"], name
        if not NAME.fullmatch(name):
            raise NotACall
        self._state, self._value = _State.ARGUMENTS, JsonValue()
        yield from self._begin(name, call_id)
        yield from self._arguments(character)

    def _arguments(self, character: str) -> Iterator[Part]:
        self._value.takes(character)
        yield from self._continue(character)
        if self._value.is_over:
            self._end()

    def _python(self, character: str) -> Iterator[Part]:
        is_complete = self._list.ends_with(character)
        if self._is_expression and not is_complete:
            return
        text = self._held[len(self._opening) :].lstrip()
        if text and PYTHON_BEGIN.fullmatch(text) is None:
            raise NotACall
        self._is_expression = self._is_expression or character == "("
        if not self._is_expression and len(text) > HEADER_CHARACTERS_MAX:
            raise NotACall
        if not is_complete:
            return
        calls = python_calls(text)
        for name, _ in calls:
            self._check(name)
        for name, arguments in calls:
            yield from self._begin(name, "")
            yield from self._continue(json.dumps(arguments, ensure_ascii=False))
            self._end()

    def _check(self, name: str) -> None:
        """Raises NotACall for a JSON answer that only looks like a call."""
        if self._format.opens_answer and name not in self._names:
            raise NotACall

    @property
    def _is_dropped(self) -> bool:
        return self._calls_max is not None and self._calls >= self._calls_max

    def _begin(self, name: str, call_id: str) -> Iterator[Part]:
        self._is_begun, self._held, self._space = True, "", ""
        if not self._is_dropped:
            yield CallPart(self._calls, name, call_id or self._new_id(name, self._calls), "")

    def _continue(self, arguments: str) -> Iterator[Part]:
        if arguments and not self._is_dropped:
            yield CallPart(self._calls, "", "", arguments)

    def _end(self) -> None:
        if not self._is_dropped:
            self._calls += 1
        self._is_begun, self._held, self._follows_call = False, "", True
        self._state = _State.OPENED if self._in_list else _State.TEXT

    def _give_up(self) -> Iterator[Part]:
        """Pass on the held text as text of the answer, but look for calls after its opening."""
        text, self._held = self._held, ""
        if self._format.opens_answer:
            self._state = _State.NO_CALLS
            yield from self._answer(text)
            return
        self._state, self._in_list = _State.TEXT, False
        opening = len(self._opening)
        self._rest = text[opening:] + self._rest
        yield from self._answer(text[:opening])


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that begins `mark`, but is not all of it."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Neighbouring texts, and neighbouring parts of one call, as one part."""
    found: list[Part] = []
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            text = "".join(part for part in group if isinstance(part, str))
            found += [text] if text else []
            continue
        calls = (part for part in group if isinstance(part, CallPart))
        for _, same in itertools.groupby(calls, lambda part: part.index):
            first, *further = same
            arguments = "".join([first.arguments, *(part.arguments for part in further)])
            found.append(first._replace(arguments=arguments))
    return found
