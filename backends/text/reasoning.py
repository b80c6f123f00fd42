"""Separates the thinking of a model from its answer, while both are streamed.

    parser               the model writes
    deepseek_r1, qwen3,  <think>THINKING</think>ANSWER
    kimi_k2
    kimi                 ◁think▷THINKING◁/think▷ANSWER

The chat template may write the first mark itself, at the end of the prompt (DeepSeek-R1). It may
also write both marks there, so that the model does not think (Qwen3 with `enable_thinking` false).
So `opened_by` reads the end of the prompt. A model of deepseek_r1 thinks from the beginning even if
it leaves out the first mark.

How the text was cut into pieces changes neither the thinking nor the answer. White space beside a
mark belongs to neither. An answer that ends before the second mark is all thinking.

Not here: tool calls in the answer (tool_calls/parser.py), the events for clients (gateway).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from backends.text.tool_calls.parser import CallReader, Part, overlap

BY_TEMPLATE, NONE = "auto", "none"  # values of the parameter reasoning_parser


class ThinkingMarks(NamedTuple):
    """The texts around a model's thinking."""

    begin: str
    end: str
    is_implied: bool = False  # the model may leave out `begin`


TAGS = ThinkingMarks("<think>", "</think>")
PARSERS = {
    "deepseek_r1": TAGS._replace(is_implied=True),
    "qwen3": TAGS,
    "kimi_k2": TAGS,
    "kimi": ThinkingMarks("◁think▷", "◁/think▷"),
}


class Thinking(NamedTuple):
    """How one answer thinks."""

    marks: ThinkingMarks
    is_open: bool  # the answer begins in the thinking, without the first mark


class Thought(NamedTuple):
    """A part of the thinking."""

    text: str


def marks_of(named: str, template: str) -> ThinkingMarks | None:
    """The marks of a model, or None if it does not think. `named`: parameter reasoning_parser.
    `template`: its chat template, which a name overrides."""
    if named != BY_TEMPLATE:
        return PARSERS.get(named)
    known = (TAGS, PARSERS["kimi"])
    return next((each for each in known if each.begin in template or each.end in template), None)


def opened_by(prompt: str, marks: ThinkingMarks) -> Thinking | None:
    """How the answer to this prompt thinks; None if the prompt has already ended the thinking."""
    ending = prompt.rstrip()
    if ending.endswith(marks.end):
        return None
    return Thinking(marks, marks.is_implied or ending.endswith(marks.begin))


class _State(enum.Enum):
    BEFORE = enum.auto()  # only white space, or a part of the first mark
    THINKING = enum.auto()
    ANSWER = enum.auto()


class ThinkingReader:
    """The reader of one answer. Not thread-safe."""

    def __init__(self, thinking: Thinking, answer: CallReader | None = None) -> None:
        """`answer`: finds the tool calls behind the thinking; None: there are none."""
        self._begin, self._end = thinking.marks.begin, thinking.marks.end
        self._answer = answer
        self._state = _State.BEFORE
        self._is_implied = thinking.is_open
        self._rest = ""  # received and not yet passed on
        self._has_begun = False  # the thinking, or the answer behind it, has a first character
        self._undecided_tokens = 0
        self.has_thought = False  # the thinking has begun
        self.thinking_tokens = 0  # of the messages that began before the end of the thinking

    @property
    def is_answering(self) -> bool:
        """Whether the thinking is over, or there was none."""
        return self._state is _State.ANSWER

    def push(self, text: str, tokens: int = 0) -> list[Thought | Part]:
        """The parts that `text`, with so many tokens, adds."""
        if self._state is not _State.ANSWER:
            self._undecided_tokens += tokens
        self._rest += text
        found = list(self._parts())
        if self._state is not _State.BEFORE:
            self.thinking_tokens += self._undecided_tokens
            self._undecided_tokens = 0
        return found

    def finish(self) -> list[Thought | Part]:
        """The parts that were held back. No push may follow."""
        rest, self._rest = self._rest, ""
        if self._state is _State.BEFORE and not self._is_implied:
            self._has_begun = True
        elif self._state is not _State.ANSWER:
            rest = rest.strip() if not self._has_begun else rest.rstrip()
            return [Thought(rest)] if rest else []
        found = self._answered(rest) if rest else []
        return found + list(self._answer.finish() if self._answer is not None else ())

    def _parts(self) -> list[Thought | Part]:
        if self._state is _State.BEFORE and not self._find_begin():
            return []
        found: list[Thought | Part] = []
        if self._state is _State.THINKING:
            found += self._thought()
        if self._state is _State.ANSWER and self._rest:
            rest, self._rest = self._rest, ""
            found += self._answered(rest)
        return found

    def _find_begin(self) -> bool:
        """Leave BEFORE, unless the text may still become the first mark."""
        text = self._rest.lstrip()
        if text.startswith(self._begin):
            self._state, self._rest = _State.THINKING, text[len(self._begin) :]
            self.has_thought = True
        elif self._begin.startswith(text):  # also without any text
            return False
        elif self._is_implied:
            self._state, self.has_thought = _State.THINKING, True
        else:
            self._state, self._has_begun = _State.ANSWER, True
            self._undecided_tokens = 0
        return True

    def _thought(self) -> list[Thought | Part]:
        """The thinking up to the second mark. White space at its end and what may be the begin of
        the mark are held back."""
        text = self._rest if self._has_begun else self._rest.lstrip()
        thought, mark, rest = text.partition(self._end)
        if mark:
            self._state, self._has_begun, self._rest = _State.ANSWER, False, rest
            thought = thought.rstrip()
        else:
            kept = text[: len(text) - overlap(text, self._end)].rstrip()
            thought, self._rest = kept, text[len(kept) :]
            self._has_begun = self._has_begun or bool(kept)
        return [Thought(thought)] if thought else []

    def _answered(self, text: str) -> list[Thought | Part]:
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        if not text:
            return []
        return list(self._answer.push(text)) if self._answer is not None else [text]
