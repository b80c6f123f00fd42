"""The thinking in an answer, however the answer is cut into pieces."""

from __future__ import annotations

import random

import pytest

from backends.config_pbtxt import REASONING_PARSERS
from backends.text.reasoning import (
    BY_TEMPLATE,
    NONE,
    PARSERS,
    TAGS,
    Thinking,
    ThinkingMarks,
    ThinkingReader,
    Thought,
    marks_of,
    opened_by,
)
from backends.text.tool_calls.formats import FORMATS
from backends.text.tool_calls.parser import CallParser, CallPart, Part

CLOSED, OPEN = Thinking(TAGS, False), Thinking(TAGS, True)
KIMI = Thinking(PARSERS["kimi"], False)


def joined(parts: list[Thought | Part]) -> tuple[str, str]:
    """(thinking, answer)."""
    thinking = "".join(part.text for part in parts if isinstance(part, Thought))
    return thinking, "".join(part for part in parts if isinstance(part, str))


def read(thinking: Thinking, *pieces: str) -> tuple[str, str]:
    reader = ThinkingReader(thinking)
    found = [part for piece in pieces for part in reader.push(piece)]
    return joined(found + reader.finish())


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (CLOSED, "<think>\nhm\n</think>\n\nyes", ("hm", "yes")),
        (CLOSED, " \n<think>hm</think>yes ", ("hm", "yes ")),
        (CLOSED, "yes <think>no</think>", ("", "yes <think>no</think>")),
        (CLOSED, "  <thing>", ("", "  <thing>")),
        (CLOSED, "<thi", ("", "<thi")),
        (CLOSED, "", ("", "")),
        (CLOSED, " ", ("", " ")),
        (CLOSED, "<think>only \n", ("only", "")),
        (CLOSED, "<think>a</thin", ("a</thin", "")),
        (CLOSED, "<think></think>yes", ("", "yes")),
        (CLOSED, "<think>a</think>b</think>", ("a", "b</think>")),
        (OPEN, "hm</think>yes", ("hm", "yes")),
        (OPEN, "<think>hm</think>yes", ("hm", "yes")),
        (OPEN, "<thi", ("<thi", "")),
        (OPEN, " hm", ("hm", "")),
        (OPEN, "</think>\nyes", ("", "yes")),
        (KIMI, "◁think▷hm◁/think▷yes", ("hm", "yes")),
    ],
)
def test_thinking_and_answer_are_separated(
    thinking: Thinking, text: str, expected: tuple[str, str]
) -> None:
    assert read(thinking, text) == expected


PARTS = (
    "<think>", "</think>", "<th", "ink>", "</", "think", " ", "\n", "a", "◁think▷", "◁/think▷",
    "<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>", "é",
)  # fmt: skip


def outcome(thinking: Thinking, has_calls: bool, pieces: list[str]) -> tuple[str, str, str]:
    """(thinking, answer, arguments of the calls)."""
    calls = CallParser(FORMATS["hermes"], ["f"], lambda *_: "id") if has_calls else None
    reader = ThinkingReader(thinking, calls)
    found = [part for piece in pieces for part in reader.push(piece, 1)] + reader.finish()
    assert all(part not in ("", Thought("")) for part in found)
    arguments = "".join(part.arguments for part in found if isinstance(part, CallPart))
    return (*joined(found), arguments)


def test_cuts_change_neither_the_thinking_nor_the_answer_nor_its_calls() -> None:
    for seed in range(10_000):
        chance = random.Random(seed)
        text = "".join(chance.choices(PARTS, k=chance.randrange(12)))
        thinking = chance.choice([CLOSED, OPEN, KIMI])
        has_calls = chance.random() < 0.5

        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(6)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected = outcome(thinking, has_calls, [text])
        assert outcome(thinking, has_calls, pieces) == expected, (seed, pieces)


def test_tokens_up_to_the_end_of_the_thinking_are_counted() -> None:
    reader = ThinkingReader(CLOSED)
    for piece in (" ", "<think>", "a", "b", "</think>", "c", "d"):
        reader.push(piece, 1)
    assert reader.thinking_tokens == 5


def test_an_answer_without_thinking_has_no_tokens_of_it() -> None:
    reader = ThinkingReader(CLOSED)
    for piece in ("<", "b", "c"):
        reader.push(piece, 1)
    reader.finish()
    assert reader.thinking_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "marks", "expected"),
    [
        ("<|im_start|>assistant\n", TAGS, CLOSED),
        ("<｜Assistant｜><think>\n", TAGS, OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", TAGS, None),
        ("Assistant:", PARSERS["deepseek_r1"], Thinking(PARSERS["deepseek_r1"], True)),
    ],
)
def test_the_end_of_the_prompt_tells_how_the_answer_thinks(
    prompt: str, marks: ThinkingMarks, expected: Thinking | None
) -> None:
    assert opened_by(prompt, marks) == expected


def test_a_template_or_a_name_tells_the_marks() -> None:
    assert marks_of(BY_TEMPLATE, "... '<think>' ...") == TAGS
    assert marks_of(BY_TEMPLATE, "content.split('</think>')") == TAGS
    assert marks_of(BY_TEMPLATE, "◁/think▷") == PARSERS["kimi"]
    assert marks_of(BY_TEMPLATE, "no marks") is None
    assert marks_of(NONE, "<think>") is None
    assert marks_of("kimi", "<think>") == PARSERS["kimi"]
    assert sorted((BY_TEMPLATE, NONE, *PARSERS)) == sorted(REASONING_PARSERS)
