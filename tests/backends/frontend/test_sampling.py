"""What a request says about sampling, and what it means by saying nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.engine.sampling_params import STOP_WORD_BYTES_MAX, STOP_WORDS_MAX
from backends.tensors import GRAMMAR, JSON_SCHEMA, REGEX
from tests.backends.asking import TOKENIZER, ask, assert_matches, refusal


@pytest.mark.parametrize(
    ("inputs", "temperature"),
    [
        ({}, 0.0),
        ({"seed": 7}, 0.0),
        ({"repetition_penalty": 1.2}, 0.0),
        ({"top_k": 0}, 0.0),
        ({"min_p": 0.0}, 0.0),
        ({"top_k": 40}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"temperature": 0.0, "top_p": 0.9}, 0.0),
        ({"temperature": 0.3}, 0.3),
        ({"sampling_parameters": '{"top_p": "0.5"}'}, 1.0),
        ({"sampling_parameters": '{"temperature": 0.25}', "top_p": 0.5}, 0.25),
    ],
)
def test_the_temperature_follows_from_what_is_said(
    inputs: dict[str, Any], temperature: float
) -> None:
    assert ask(**inputs).sampling.temperature == temperature


def test_top_k_of_one_is_greedy_whatever_the_temperature() -> None:
    assert ask(top_k=1, temperature=0.9).sampling.is_greedy


def test_the_default_length_shrinks_to_what_fits_and_grows_to_min_tokens() -> None:
    assert ask(input_ids=[1] * 500).sampling.max_tokens == 12
    assert ask(input_ids=[1], min_tokens=300).sampling.max_tokens == 300
    assert ask(input_ids=[1] * 511).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (
            {"input_ids": [1] * 12, "max_tokens": 501},
            "length is 512 tokens.*requested 513 tokens .12 in.*501 in.*1 to 500",
        ),
        ({"max_tokens": 0}, "max_tokens is 0; use 1 to"),
        ({"max_tokens": -5}, "max_tokens is -5; use 1 to"),
        ({"max_tokens": [1, 2]}, "max_tokens has 2 values; send one"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens is 6; use 0 to max_tokens"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 3, "min_length": 4}, "min_tokens is 3 but min_length is 4.*send one"),
        ({"seed": 3, "random_seed": 4}, "seed is 3 but random_seed is 4.*send one"),
        ({"temperature": float("nan")}, "temperature is nan; use 0"),
        ({"temperature": float("inf")}, "temperature is inf; use 0"),
        ({"temperature": -0.5}, "temperature is -0.5; use 0"),
        ({"top_p": 0.0}, "top_p is 0.0; use a number above 0, up to 1"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"end_id": 9999}, "end id 9999 is outside the vocabulary"),
        ({"end_id": -2}, "end id -2 is outside the vocabulary"),
        ({"stop_words": ["a"] * 10_000}, f"10000 words; use at most {STOP_WORDS_MAX}"),
        ({"stop_words": ["a", ""]}, r"stop_words\[1\] is empty"),
        ({"stop_words": ["a", b"\xc3"]}, r"stop_words\[1\] is not valid UTF-8 at byte 0"),
        ({"stop_words": ["é" * 129]}, f"has 258 bytes; use at most {STOP_WORD_BYTES_MAX}"),
        ({"stop_words": [b"\xff"] * 9}, "and 6 more of this kind"),
        ({"stream_interval": 0}, "stream_interval is 0; use 1 to"),
        ({"beam_width": 4}, "beam_width is not supported by this server; leave it out or send 1"),
        ({"lora_task_id": 7}, "lora_task_id is not supported"),
        ({"bad_words": ["x"]}, "bad_words is not supported"),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type need each other"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide and"),
        (
            {"guided_decoding_guide_type": "xml", "guided_decoding_guide": "a"},
            "is 'xml'; use json,",
        ),
        (
            {
                "guided_decoding_guide_type": "regex",
                "guided_decoding_guide": "a",
                "guided_json": "{}",
            },
            "guided_json exclude each other",
        ),
        (
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"not": {}}'},
            "guided_decoding_guide: not at #",
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(?=a)"},
            "guided_decoding_guide cannot be followed: pattern: error: look-around",
        ),
    ],
)
def test_a_broken_limit_is_named_with_the_remedy(inputs: dict[str, Any], expected: str) -> None:
    assert_matches(expected, refusal(**inputs))


@pytest.mark.parametrize(
    ("given", "text", "kind", "guide"),
    [
        ("json", "", JSON_SCHEMA, "{}"),
        ("json_schema", '{"const": 1}', JSON_SCHEMA, '{"const": 1}'),
        ("regex", "a+", REGEX, "a+"),
        ("ebnf_grammar", 'root ::= "a"', GRAMMAR, 'root ::= "a"'),
        ("", "", JSON_SCHEMA, ""),
    ],
)
def test_a_grammar_may_come_in_the_inputs_of_tensorrt_llm(
    given: str, text: str, kind: str, guide: str
) -> None:
    sampling = ask(guided_decoding_guide_type=given, guided_decoding_guide=text).sampling
    assert (sampling.guide_kind, sampling.guide) == (kind, guide)


def test_the_older_spellings_count() -> None:
    assert ask(min_length=4, random_seed=5).sampling.min_tokens == 4
    assert ask(min_length=4, min_tokens=4, random_seed=5).sampling.seed == 5


def test_end_tokens_are_the_checkpoints_one_of_the_clients_or_none() -> None:
    assert ask().sampling.end_ids == TOKENIZER.eos_ids
    assert ask(end_id=7).sampling.end_ids == (7,)
    assert ask(end_id=-1).sampling.end_ids == ()
    assert ask(sampling_parameters='{"ignore_eos": true}').sampling.end_ids == ()
    assert ask(sampling_parameters='{"ignore_eos": "true"}', end_id=7).sampling.end_ids == (7,)


def test_one_empty_stop_word_is_none_as_in_the_examples_of_tensorrt_llm() -> None:
    assert ask(stop_words=[""]).sampling.stop_words == ()
    assert ask(stop_words=[]).sampling.stop_words == ()


def test_vllms_json_may_write_numbers_as_strings_and_tensors_win() -> None:
    text = json.dumps(
        {
            "max_tokens": "6",
            "min_tokens": "2",
            "temperature": "0.5",
            "top_p": 0.9,
            "top_k": -1,
            "min_p": "0.1",
            "seed": "8",
            "stop": "END",
            "presence_penalty": 0.5,
            "frequency_penalty": "0.25",
            "repetition_penalty": 1.5,
            "ignore_eos": None,
            "logit_bias": {"5": "1.5", "7": -3},
        }
    )
    sampling = ask(sampling_parameters=text, max_tokens=7).sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (7, 2, 8)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.stop_words) == (0.1, ("END",))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert sampling.logit_bias == ((5, 1.5), (7, -3.0))
    assert ask(sampling_parameters='{"stop": ["a", "b"]}').sampling.stop_words == ("a", "b")
    both = ask(sampling_parameters='{"stop": "a"}', stop_words=["c"])
    assert both.sampling.stop_words == ("c",)
    assert ask(sampling_parameters="").sampling == ask().sampling


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", r"sampling_parameters is \[\]; send a JSON object"),
        ("nope", "sampling_parameters is not valid JSON"),
        ("[" * 60_000, "sampling_parameters is not valid JSON"),
        ('{"max_token": 5}', "'max_token' is not supported; did you mean max_tokens?"),
        ('{"logprobs": 5}', "'logprobs' is not supported"),
        ('{"logit_bias": [5]}', "logit_bias is .*; send an object"),
        ('{"logit_bias": {"a": 5}}', "logit_bias is .*; invalid literal"),
        ('{"logit_bias": {"5": null}}', "logit_bias is .*; send a number"),
        ('{"logit_bias": {"5": NaN}}', "logit_bias of token 5 is nan"),
        ('{"max_tokens": "six"}', "max_tokens is 'six'"),
        ('{"max_tokens": 1.5}', "max_tokens is 1.5; send a whole number"),
        ('{"max_tokens": true}', "max_tokens is True; send a whole number"),
        ('{"max_tokens": 1' + "0" * 400 + "}", "send a whole number"),
        ('{"seed": -1}', "seed is -1"),
        ('{"temperature": "hot"}', "temperature is 'hot'"),
        ('{"temperature": 1e999}', "temperature is inf; send a finite number"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"temperature": [1]}', r"temperature is \[1\]; send a number"),
        ('{"ignore_eos": 2}', "ignore_eos is 2; send true or false"),
        ('{"stop": 5}', "stop is 5; send a string or a list of strings"),
        ('{"stop": ["\\ud800"]}', "not valid UTF-8"),
        ('{"stop": [""]}' + " " * 70_000, "70,014 bytes; send at most 65,536"),
    ],
)
def test_bad_vllm_json_is_refused_by_key(text: str, expected: str) -> None:
    assert_matches(expected, refusal(sampling_parameters=text))
