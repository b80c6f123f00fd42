"""Guides: whatever is drawn among what they allow validates, or the schema was refused by name."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema.validators import validator_for

from backends.errors import InvalidRequest
from backends.tensors import JSON_SCHEMA
from backends.text import guides
from backends.text.guides import Guides, guides_of
from backends.text.json_schema import KEYWORDS
from backends.text.tokenizer import Tokenizer
from tests.backends.small_tokenizers import DEMO
from tests.backends.text.schemas import schemas

TOKENIZER = Tokenizer.load(DEMO)
GUIDES = guides_of(TOKENIZER)
END_IDS = TOKENIZER.eos_ids
TOKENS_MAX = 400
# Of making examples, on a busy machine.
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
# Where one of these may come a random answer comes to an end.
CLOSING = [*END_IDS, *(token_id for text in ('"', "}", "]") for token_id in TOKENIZER.encode(text))]


def drawn_at_random(text: str, chance: np.random.Generator, kind: str = JSON_SCHEMA) -> str | None:
    """An answer that a model could give which likes every token alike; None: it is too long."""
    guide, output_ids = GUIDES.guide(text, END_IDS, [], kind), list[int]()
    for count in range(TOKENS_MAX):
        allowed = guide.allowed()
        closing = [token_id for token_id in CLOSING if allowed[token_id]]
        if closing and chance.random() < count / 40:
            token_id = int(closing[0] if count > 40 else chance.choice(closing))
        else:
            token_id = int(chance.choice(np.flatnonzero(allowed)))
        if token_id in END_IDS:
            return TOKENIZER.decode(output_ids)
        guide.advance(token_id)
        output_ids.append(token_id)
    return None


def check_refusal(error: InvalidRequest, schema: dict[str, Any]) -> None:
    """It names a keyword of the schema."""
    named = set(re.findall(r"[\w.$-]+", str(error)))
    said = KEYWORDS | set(re.findall(r'"([\w.$-]+)":', json.dumps(schema)))
    assert str(error).startswith("guided_json") and named & said, str(error)


def check_validates(text: str, schema: dict[str, Any]) -> None:
    """A number that has more digits than a float counts as it is written."""
    validator = validator_for(schema)(schema)
    try:
        validator.validate(json.loads(text))
    except jsonschema.ValidationError:
        validator.validate(json.loads(text, parse_float=Decimal))


def check(schema: dict[str, Any], seed: int) -> bool:
    """Whether it could be followed."""
    chance = np.random.default_rng(seed)
    text = json.dumps(schema)
    try:
        GUIDES.guide(text, END_IDS, [])
    except InvalidRequest as error:
        check_refusal(error, schema)
        return False
    for _ in range(3):
        answer = drawn_at_random(text, chance)
        if answer is not None:
            check_validates(answer, schema)
    return True


@given(schemas(), st.integers(0, 2**32))
@settings(max_examples=60, suppress_health_check=SLOW)
def test_random_answers_validate_or_the_schema_is_refused_by_name(
    schema: dict[str, Any], seed: int
) -> None:
    check(schema, seed)


@pytest.mark.long
@given(schemas(), st.integers(0, 2**32))
@settings(max_examples=1_000, suppress_health_check=SLOW)
def test_random_answers_to_a_thousand_schemas_validate(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed)


def follow(schema: dict[str, Any], answer: str, end_ids: tuple[int, ...] = END_IDS) -> Any:
    """A guide behind this text, token by token: each of its tokens must be allowed."""
    guide = GUIDES.guide(json.dumps(schema), end_ids, [])
    for token_id in TOKENIZER.encode(answer):
        assert guide.allowed()[token_id], (answer, token_id)
        guide.advance(token_id)
    return guide


ONE_NAME = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_an_end_id_may_come_where_the_answer_is_complete_and_nowhere_else() -> None:
    dot = TOKENIZER.encode(".")[0]
    for end_ids in (END_IDS, (dot,), (*END_IDS, dot)):
        begun = follow(ONE_NAME, '{"name": "x', end_ids).allowed()
        assert not begun[list(end_ids)].any() and not begun[list(END_IDS)].any()
        complete = follow(ONE_NAME, '{"name": "x"}', end_ids).allowed()
        assert np.flatnonzero(complete).tolist() == sorted(end_ids)


def test_a_guide_that_is_made_of_the_tokens_so_far_stands_where_the_first_one_stood() -> None:
    text = json.dumps(ONE_NAME)
    output_ids = TOKENIZER.encode('{ "name": "ab\\"c')
    first = GUIDES.guide(text, END_IDS, [])
    for count, token_id in enumerate(output_ids):
        again = GUIDES.guide(text, END_IDS, output_ids[:count])
        np.testing.assert_array_equal(again.allowed(), first.allowed())
        first.advance(token_id)


def test_guides_of_one_schema_do_not_know_of_each_other() -> None:
    text = json.dumps({"enum": ["ab", "cd"]})
    one, other = GUIDES.guide(text, END_IDS, []), GUIDES.guide(text, END_IDS, [])
    for token_id in TOKENIZER.encode('"ab"'):
        one.advance(token_id)
    assert one.allowed()[list(END_IDS)].all()
    assert other.allowed()[TOKENIZER.encode('"')[0]]


def test_tokens_that_are_not_of_the_answer_are_refused_by_a_worker() -> None:
    with pytest.raises(InvalidRequest, match=r"token .* is not allowed next"):
        GUIDES.guide(json.dumps(ONE_NAME), END_IDS, TOKENIZER.encode("[1]"))


def test_logits_without_a_token_are_never_allowed() -> None:
    wider = Guides(lambda: TOKENIZER, TOKENIZER.vocabulary_tokens + 100)
    allowed = wider.guide("{}", END_IDS, []).allowed()
    assert len(allowed) == TOKENIZER.vocabulary_tokens + 100
    assert allowed.any() and not allowed[TOKENIZER.vocabulary_tokens :].any()


def test_a_text_that_only_looks_like_the_escape_of_a_control_character_is_allowed() -> None:
    value = r"a \u0012 and \\u0001"
    assert follow({"const": value}, json.dumps(value)).allowed()[list(END_IDS)].all()


def test_a_key_cannot_pass_for_another_name_by_an_escape() -> None:
    guide = follow({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"\\')
    assert not guide.allowed()[TOKENIZER.encode("u")[0]]


def test_white_space_is_a_space_or_a_line_with_its_indentation() -> None:
    follow(ONE_NAME, '{\n    "name": "x"\n}')
    guide = follow(ONE_NAME, "{\n")
    assert not guide.allowed()[TOKENIZER.encode("\n")[-1]]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"type": "object", "properties": {"a": {"not": {}}}}', "not at #/properties/a: "),
        ('{"minimun": 1}', "minimun at #: .*did you mean minimum"),
        ('{"items": {"uniqueItems": true}}', "uniqueItems at #/items: it is not supported"),
        ('{"type": "string", "minLength": -1}', "minLength at #: it must be a whole number"),
        ('{"minimum": "3"}', "minimum at #: it must be a number"),
        ('{"minimum": NaN}', "NaN is not JSON"),
        ('{"maximum": 1e999}', "Out of range"),
        ('{"type": "int"}', "type at #: use some of null"),
        ('{"$ref": "#/$defs/b", "$defs": {"a": {}}}', r"\$ref at #: there is no schema #/\$defs/b"),
        ('{"$ref": "#/x-a", "x-a": {"minProperties": 3}}', r"\$ref at #: there is no schema #/x-a"),
        ('{"$ref": "#/const", "const": {"type": "null"}}', r"\$ref at #: there is no schema"),
        ('{"$ref": "#"}', "no answer satisfies it .*ref"),
        ('{"allOf": [{"$ref": "#"}]}', "no answer satisfies it .*allOf"),
        ('{"enum": []}', "enum at #: "),
        ('{"multipleOf": 1000003}', "multipleOf at #: the least common multiple"),
        ('{"allOf": [{"multipleOf": 37}, {"multipleOf": 41}]}', "multipleOf at #/allOf/1: the"),
        ('{"const": "\\u0001"}', "const at #: control characters"),
        ('{"type": "integer", "enum": ["a"]}', "incompatible types .*enum, type"),
        ('{"$schema": "http://json-schema.org/draft-03/schema#"}', r"\$schema at #: use a draft"),
        (
            '{"$schema": "http://json-schema.org/draft-04/schema#", "exclusiveMinimum": 3}',
            "exclusiveMinimum at #: it must be true or false in draft-04",
        ),
        (
            '{"$schema": "http://json-schema.org/draft-04/schema#", "items": {"id": "#x"}}',
            "id at #/items: ",
        ),
        ('{"exclusiveMinimum": true}', "exclusiveMinimum at #: it must be a number"),
        ('{"items": [{}]}', "items at #: use prefixItems"),
        ('{"items": {}, "additionalItems": {}}', "additionalItems at #: it is not defined in 2020"),
        (
            '{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
            "oneOf: its cases are not provably exclusive",
        ),
        (
            '{"$schema": "http://json-schema.org/draft-04/schema#", '
            '"oneOf": [{"type": "string"}, {"const": null}]}',
            "const at #/oneOf/1: it is not supported with oneOf, as draft-04 ignores it",
        ),
        (
            '{"$schema": "http://json-schema.org/draft-07/schema#", "$defs": {"text": {}}, '
            '"oneOf": [{"type": "string"}, {"$ref": "#/$defs/text", "type": "null"}]}',
            r"\$ref at #/oneOf/1: it is not supported with oneOf, as draft-07 ignores it",
        ),
        (
            '{"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]}',
            "prefixItems at #: it is not defined in ",
        ),
        ("[]", "it is not a JSON object"),
        ("true", "it is not a JSON object"),
        ("{", "it is not valid JSON"),
        ('{"items": ' * 70 + "{}" + "}" * 70, "nested 71 deep; use at most 60"),
        ('{"items": ' * 5000 + "{}" + "}" * 5000, "it is not valid JSON: .*recursion"),
        ('{"a1": 0, "a2": 0, "a3": 0, "a4": 0, "a5": 0, "a6": 0, "a7": 0}', "and 2 more"),
    ],
)
def test_what_is_in_the_way_of_a_schema_is_named(schema: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        GUIDES.guide(schema, END_IDS, [])
    assert str(refusal.value).startswith("guided_json")


def test_annotations_and_extensions_of_others_are_no_hindrance() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "urn:x",
        "title": "t",
        "description": "d",
        "type": "integer",
        "default": 3,
        "examples": [1],
        "x-order": 4,
        "uniqueItems": False,
        "minimum": 3,
        "maximum": 3,
    }
    follow(schema, "3")


def test_what_older_drafts_say_otherwise_is_understood() -> None:
    draft = {"$schema": "http://json-schema.org/draft-04/schema#", "id": "urn:x"}
    above = {**draft, "type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 4}
    assert not follow(above, "").allowed()[TOKENIZER.encode("3")[0]]
    assert follow({**above, "exclusiveMinimum": False}, "").allowed()[TOKENIZER.encode("3")[0]]
    pair = {
        **draft,
        "type": "array",
        "items": [{"type": "integer"}, {"type": "null"}],
        "minItems": 2,
    }
    follow({**pair, "additionalItems": False}, "[3,null]")
    closed = follow({**pair, "additionalItems": False}, "[3,null").allowed()
    assert not closed[TOKENIZER.encode(",")[0]]
    follow({**pair, "additionalItems": {"const": 5}}, "[3,null,5]")


def test_a_schema_that_only_its_first_tokens_show_to_be_too_large_is_refused_before_them() -> None:
    part = {"type": "string", "pattern": "a|b"}
    large = {f"p{number}": part for number in range(700)}
    schema = {"type": "object", "properties": large, "additionalProperties": False}
    with pytest.raises(InvalidRequest, match=r"cannot be followed: .*properties"):
        GUIDES.guide(json.dumps(schema), END_IDS, [])


def test_a_number_with_more_digits_than_a_float_is_right_as_it_is_written() -> None:
    schema = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
    follow(schema, "0.99999999999999999999")
    check_validates("0.99999999999999999999", schema)
    with pytest.raises(jsonschema.ValidationError):
        check_validates("1.0", schema)


def test_a_grammar_is_compiled_once_and_only_the_latest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    class Counted(Guides):
        def _compiled(self, kind: str, text: str, vocabulary: Any) -> Any:
            compiled.append(text)
            return super()._compiled(kind, text, vocabulary)

    monkeypatch.setattr(guides, "GRAMMARS_MAX", 2)
    counted = Counted(lambda: TOKENIZER, TOKENIZER.vocabulary_tokens)
    one, two, three = ('{"const": 1}', '{"const": 2}', '{"const": 3}')
    for text in (one, one, two, one, three, one, two):
        counted.guide(text, END_IDS, [])
    assert compiled == [one, two, three, two]
    monkeypatch.setattr(guides, "GRAMMARS_NODES_MAX", 2 * guides.NODES_OF_ONE + 1)
    for text in (three, two):
        counted.guide(text, END_IDS, [])
    assert compiled[4:] == [three, two], "two of them are too many nodes"


def test_a_refusal_is_remembered() -> None:
    compiled: list[str] = []

    class Counted(Guides):
        def _compiled(self, kind: str, text: str, vocabulary: Any) -> Any:
            compiled.append(text)
            return super()._compiled(kind, text, vocabulary)

    counted = Counted(lambda: TOKENIZER, TOKENIZER.vocabulary_tokens)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="minimun"):
            counted.guide('{"minimun": 1}', END_IDS, [])
    assert len(compiled) == 1


def test_a_schema_that_takes_long_holds_up_nobody_who_has_another_one() -> None:
    slow, quick = json.dumps(ONE_NAME), "{}"
    begun, may_end = threading.Event(), threading.Event()
    compiled: list[str] = []

    class Slow(Guides):
        def _compiled(self, kind: str, text: str, vocabulary: Any) -> Any:
            compiled.append(text)
            if text == slow:
                begun.set()
                assert may_end.wait(60)
            return super()._compiled(kind, text, vocabulary)

    held = Slow(lambda: TOKENIZER, TOKENIZER.vocabulary_tokens)
    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(held.guide, slow, END_IDS, [])
            assert begun.wait(60)
            second = pool.submit(held.guide, slow, END_IDS, [])
            assert held.guide(quick, END_IDS, []).allowed().any()
            assert not first.done() and not second.done()
        finally:
            may_end.set()
        assert first.result(60).allowed().any() and second.result(60).allowed().any()
    assert compiled == [slow, quick]


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "is_installed", lambda: False)
    with pytest.raises(InvalidRequest, match=r"pip install 'mooncake-triton\[guided\]'"):
        GUIDES.guide("{}", END_IDS, [])


def test_a_checkpoint_without_an_end_token_cannot_be_guided() -> None:
    endless = Tokenizer.load(DEMO)
    endless.eos_ids = ()
    with pytest.raises(InvalidRequest, match="needs a checkpoint with an end token"):
        Guides(lambda: endless, endless.vocabulary_tokens).guide("{}", (5,), [])
