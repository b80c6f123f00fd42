"""Guides of regular expressions, grammars and structural tags: an answer drawn among the allowed
tokens has the wanted form, or the text was refused with a reason."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import InvalidRequest
from backends.gateway.request.structured_outputs import read_structured
from backends.tensors import AFTER_THINKING, GRAMMAR, JSON_SCHEMA, REGEX, STRUCTURAL_TAG
from backends.text.guides import GRAMMARS_NODES_MAX, Guides
from backends.text.tokenizer import Tokenizer
from tests.backends.small_tokenizers import DEMO
from tests.backends.text.test_guides import END_IDS, GUIDES, SLOW, TOKENIZER, drawn_at_random

ITEMS = ["a", "b", "é", r"\.", r"\n", " ", "[a-c0-3]", "[^x]", "0"]
PATTERNS = st.recursive(
    st.sampled_from(ITEMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ADD = {
    "type": "object",
    "properties": {"name": {"enum": ["add"]}, "arguments": {"$ref": "#/$defs/0"}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
    "$defs": {"0": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
STRUCTURE = {"begin": "<tool_call>\n", "schema": ADD, "end": "\n</tool_call>"}
TAG = json.dumps({"triggers": ["<tool_call>"], "structures": [STRUCTURE]})
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
THINKING = {"begin": "<think>", "end": "</think>"}
THEN_JSON = json.dumps({**THINKING, "schema": OBJECT})
THEN_PATTERN = json.dumps({**THINKING, "begin": "", "pattern": "[ab]{2}/c"})


def is_followed(kind: str, text: str, answer: str) -> bool:
    """Whether the guide allows each token of this answer, and then an end id."""
    guide = GUIDES.guide(text, END_IDS, [], kind)
    for token_id in TOKENIZER.encode(answer):
        if not guide.allowed()[token_id]:
            return False
        guide.advance(token_id)
    return bool(guide.allowed()[list(END_IDS)].all())


@given(PATTERNS, st.integers(0, 2**32))
@settings(max_examples=150, suppress_health_check=SLOW)
def test_random_answers_match_their_regular_expression(pattern: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    for _ in range(3):
        answer = drawn_at_random(pattern, chance, REGEX)
        assert answer is None or re.fullmatch(pattern, answer), (pattern, answer)


@given(st.lists(TEXTS, min_size=1, max_size=6).filter(any), st.integers(0, 2**32))
@settings(max_examples=150, suppress_health_check=SLOW)
def test_every_choice_can_be_answered_and_nothing_else(choices: list[str], seed: int) -> None:
    form = read_structured({"choice": choices})
    assert form.kind == REGEX
    for choice in choices:
        assert is_followed(REGEX, form.text, choice), choice
    chance = np.random.default_rng(seed)
    assert {drawn_at_random(form.text, chance, REGEX) for _ in range(5)} <= set(choices)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/',
        'root ::= number ("+" number)*\nnumber ::= [0-9]+',
    ],
)
def test_a_grammar_may_be_lark_or_gbnf(grammar: str) -> None:
    assert is_followed(GRAMMAR, grammar, "12+3+456")
    assert not is_followed(GRAMMAR, grammar, "12+") and not is_followed(GRAMMAR, grammar, "a")
    chance = np.random.default_rng(7)
    for _ in range(10):
        answer = drawn_at_random(grammar, chance, GRAMMAR)
        assert answer is None or re.fullmatch(r"[0-9]+(\+[0-9]+)*", answer), answer


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (REGEX, "(?=a)", "pattern: error: look-around"),
        (REGEX, r"(a)\1", "pattern: error: backreferences"),
        (REGEX, "[a", "pattern: error: unclosed character class"),
        (REGEX, "(" * 3_000, "pattern: error: unclosed group"),
        (REGEX, r"a[^\s\S]", "no answer satisfies it"),
        (REGEX, "(" * 300 + "a" + ")" * 300, "pattern: error: "),
        (GRAMMAR, "start: a", 'unknown name: "a"'),
        (GRAMMAR, 'start: "a" start', "Too many items"),
        (GRAMMAR, "start: a\na: b\nb: a", "no answer satisfies it"),
        (GRAMMAR, "root ::= x", "Rule 'x' not found"),
        (GRAMMAR, "root ::= " + "(" * 3_000, "recursion"),
        (GRAMMAR, 'root ::= "\\', "cannot be read"),
        (GRAMMAR, "start: " + "(" * 5_000 + '"a"' + ")" * 5_000, "too deeply nested"),
        (GRAMMAR, 'start: %json {"type": "null"}', "%json is not supported"),
        (GRAMMAR, "start: <|nothing|>", "unknown special token"),
        (STRUCTURAL_TAG, "{}", "it is not JSON of triggers"),
        (STRUCTURAL_TAG, "[" * 50_000, "it is not JSON of triggers"),
        (STRUCTURAL_TAG, TAG.replace('"end": "\\n</tool_call>"', '"end": 5'), "it is not JSON"),
        (STRUCTURAL_TAG, TAG.replace('"triggers": ["<tool', '"triggers": ["<'), "it is not JSON"),
        (STRUCTURAL_TAG, TAG.replace('"enum": ["add"]', '"enum": []'), "enum at #/properties/name"),
        (AFTER_THINKING, "{}", "it is not JSON of begin, end"),
        (AFTER_THINKING, THEN_JSON.replace("</think>", ""), "it is not JSON of begin, end"),
        (AFTER_THINKING, THEN_JSON.replace('"integer"', '"number", "enum": []'), "enum at #/pro"),
        (AFTER_THINKING, THEN_PATTERN.replace("[ab]", "[ab"), "pattern: error: unclosed"),
    ],
)
def test_a_text_that_no_answer_can_follow_is_refused_with_a_reason(
    kind: str, text: str, words: str
) -> None:
    for _ in range(2):  # the second time, the refusal is cached
        with pytest.raises(InvalidRequest, match=re.escape(words)) as refusal:
            GUIDES.guide(text, END_IDS, [], kind)
        assert str(refusal.value).startswith("guided_decoding_guide")


def test_equal_texts_of_two_kinds_are_two_grammars() -> None:
    text = '{"const": 1}'
    assert is_followed(JSON_SCHEMA, text, "1")
    with pytest.raises(InvalidRequest):
        GUIDES.guide(text, END_IDS, [], GRAMMAR)
    assert is_followed(JSON_SCHEMA, text, "1") and not is_followed(JSON_SCHEMA, text, text)


def test_grammars_of_texts_stay_within_the_weight_of_the_cache() -> None:
    own = Guides(lambda: TOKENIZER, TOKENIZER.vocabulary_tokens)
    for number in range(40):
        own.guide(f"a{number}+", END_IDS, [], REGEX)
    assert sum(each.nodes for each in own._grammars.values()) <= GRAMMARS_NODES_MAX
    assert 1 < len(own._grammars) < 40


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "free text, and <tool_cal",
        'before <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>' * 2 + "after",
    ],
)
def test_a_structural_tag_allows_text_and_calls_that_follow_the_schema(answer: str) -> None:
    assert is_followed(STRUCTURAL_TAG, TAG, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>",
        "<tool_call> text",
        '<tool_call>\n{"name": "sub"',
        '<tool_call>\n{"name": "add", "arguments": {"a": "1"',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}',
    ],
)
def test_a_structural_tag_allows_no_other_call(answer: str) -> None:
    assert not is_followed(STRUCTURAL_TAG, TAG, answer)


@pytest.mark.parametrize(
    ("text", "answer", "is_allowed"),
    [
        (THEN_JSON, '<think>Is it {"a": 1}?\n</think>\n\n{"a": 12}', True),
        (THEN_JSON, '<think></think>{"a": 12}', True),
        (THEN_JSON, '{"a": 12}', True),
        (THEN_JSON, "<think>hm", False),
        (THEN_JSON, "<think>hm</think>", False),
        (THEN_JSON, "<think>hm</think> text", False),
        (THEN_JSON, '<think>hm</think>{"a": 1} text', False),
        (THEN_JSON, "text", False),
        (THEN_PATTERN, "hm</think>ab/c", True),
        (THEN_PATTERN, "</think>\nba/c", True),
        (THEN_PATTERN, "ab/c", False),
        (THEN_PATTERN, "hm</think>abc", False),
    ],
)
def test_an_answer_follows_its_form_behind_the_thinking(
    text: str, answer: str, is_allowed: bool
) -> None:
    assert is_followed(AFTER_THINKING, text, answer) == is_allowed


def with_marks(folder: Path, marks: tuple[str, ...], is_special: bool) -> Tokenizer:
    """A tokenizer whose marks are one added token each, as in Qwen's tokenizers."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "vocab_size": 2_048 + len(marks)}))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(mark, special=is_special) for mark in marks])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert [len(tokenizer.encode(mark)) for mark in marks] == [1] * len(marks)
    return tokenizer


@pytest.mark.parametrize("is_special", [False, True])
def test_marks_of_the_thinking_may_be_tokens_of_their_own(tmp_path: Path, is_special: bool) -> None:
    tokenizer = with_marks(tmp_path, ("<think>", "</think>"), is_special)
    guides = Guides(lambda: tokenizer, tokenizer.vocabulary_tokens)
    for answer, is_allowed in (
        ('<think>hm</think>\n\n{"a": 12}', True),
        ('<think>hm <think> </think>{"a": 12}', True),
        ('{"a": 12}', True),
        ('<think>hm{"a": 12}', False),
        ("<think>hm</think></think>", False),
    ):
        guide = guides.guide(THEN_JSON, END_IDS, [], AFTER_THINKING)
        token_ids = tokenizer.encode(answer)
        for token_id in token_ids:
            if not guide.allowed()[token_id]:
                break
            guide.advance(token_id)
        else:
            assert bool(guide.allowed()[list(END_IDS)].all()) == is_allowed, answer
            continue
        assert not is_allowed, answer


@pytest.mark.parametrize("is_special", [False, True])
def test_marks_may_be_tokens_of_their_own_and_other_tokens_stay_allowed(
    tmp_path: Path, is_special: bool
) -> None:
    tokenizer = with_marks(tmp_path, ("<tool_call>", "</tool_call>", "<think>"), is_special)
    guides = Guides(lambda: tokenizer, tokenizer.vocabulary_tokens)

    def allows(token_ids: list[int]) -> bool:
        guide = guides.guide(TAG, END_IDS, [], STRUCTURAL_TAG)
        for token_id in token_ids:
            if not guide.allowed()[token_id]:
                return False
            guide.advance(token_id)
        return bool(guide.allowed()[list(END_IDS)].all())

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for text in ("<think>hm<think> text", f"<think>hm {call}\n{call} end", call):
        assert allows(tokenizer.encode(text)), text
    wrong = (call.replace("1", '"1"'), call.replace("add", "x"))
    for text in ("<tool_call>", "<tool_call> x", *wrong):
        assert not allows(tokenizer.encode(text)), text
    spelt = [*TOKENIZER.encode("<tool_call>"), *TOKENIZER.encode(" x")]
    assert not allows(spelt), "a mark that is spelt in other tokens opens a call too"
