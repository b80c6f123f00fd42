"""Sampling is a pure function, and means what transformers means by the same words."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from backends.engine.sampling import (
    Floats,
    adjusted_logits,
    distribution,
    draw,
    largest_rows,
    sample,
    uniform,
)
from backends.engine.sampling_params import SamplingLimits, SamplingParams
from backends.tensors import GRAMMAR
from backends.token_logprobs import token_logprobs

VOCABULARY = 500
LIMITS = SamplingLimits(prompt_tokens=10, context_tokens_max=100, vocabulary_tokens=VOCABULARY)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "temperature": 1.0, **values})


def random_logits(seed: int, spread: float = 3.0) -> Floats:
    return np.random.default_rng(seed).normal(0, spread, VOCABULARY).astype(np.float32)


def processors(given: SamplingParams, prompt_tokens: int) -> LogitsProcessorList:
    """The same request in transformers' words, in the order of its generate()."""
    found = LogitsProcessorList()
    if given.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(given.repetition_penalty))
    if given.min_tokens:
        found.append(
            MinNewTokensLengthLogitsProcessor(prompt_tokens, given.min_tokens, list(given.end_ids))
        )
    found.append(TemperatureLogitsWarper(given.temperature))
    if given.top_k:
        found.append(TopKLogitsWarper(given.top_k))
    if given.top_p < 1:
        found.append(TopPLogitsWarper(given.top_p))
    if given.min_p:
        found.append(MinPLogitsWarper(given.min_p))
    return found


def test_three_hundred_random_requests_agree_with_transformers(seed: int) -> None:
    chance = random.Random(seed)
    for case in range(300):
        logits = random_logits(chance.randrange(2**32), chance.choice([0.5, 3.0, 10.0]))
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 30))]
        output = [chance.randrange(VOCABULARY) for _ in range(chance.randint(0, 30))]
        given = params(
            temperature=chance.choice([0.2, 0.7, 1.0, 1.8]),
            top_k=chance.choice([0, 1, 2, 40, 5000]),
            top_p=chance.choice([0.05, 0.5, 0.9, 0.999, 1.0]),
            min_p=chance.choice([0.0, 0.0, 0.02, 0.3]),
            repetition_penalty=chance.choice([1.0, 0.8, 1.3]),
            min_tokens=chance.choice([0, 10]),
            end_ids=(3, 4),
        )
        history = torch.tensor([prompt + output])
        expected = torch.softmax(
            processors(given, len(prompt))(history, torch.from_numpy(logits)[None]),  # type: ignore
            dim=-1,
        )[0].numpy()
        scores = adjusted_logits(logits, given, len(output), prompt, output)
        ours = [whole_distribution(scores, variant) for variant in within_rounding(given)]
        assert any(np.allclose(mine, expected, atol=2e-5) for mine in ours), f"case {case}: {given}"


def whole_distribution(scores: Floats, given: SamplingParams) -> Floats:
    probabilities = np.zeros(VOCABULARY)
    token_ids, kept = distribution(scores, given)
    probabilities[token_ids] = kept / kept.sum()
    return probabilities


def within_rounding(given: SamplingParams) -> list[SamplingParams]:
    """transformers adds in float32: a token exactly at a cut may fall on either side."""
    return [given] + [
        replace(given, top_p=min(1.0, given.top_p * wider), min_p=given.min_p / wider)
        for wider in (1 + 1e-6, 1 - 1e-6)
    ]


def test_the_same_request_draws_the_same_token_anywhere(seed: int) -> None:
    logits = random_logits(seed)
    given = params(temperature=1.3, top_p=0.95, seed=seed)
    first = [sample(logits, given, position, [1], []) for position in range(50)]
    second = [sample(logits.copy(), given, position, [1], []) for position in reversed(range(50))]
    assert first == second[::-1], "neither order nor earlier calls may matter"
    assert len(set(first)) > 5, "positions must differ"
    other = [sample(logits, params(temperature=1.3, seed=seed + 1), p, [1], []) for p in range(50)]
    assert first != other


def test_the_logits_are_left_alone() -> None:
    logits = random_logits(1)
    before = logits.copy()
    given = params(
        repetition_penalty=1.5, frequency_penalty=1.0, min_tokens=5, end_ids=(1,), top_k=9
    )
    sample(logits, given, 0, [1, 2], [])
    sample(logits, given, 3, [1, 2], [4, 4, 5])
    np.testing.assert_array_equal(logits, before)


@pytest.mark.slow
def test_frequencies_follow_the_probabilities() -> None:
    logits = random_logits(5, spread=1.0)
    given = params(top_k=8, temperature=0.9, seed=11)
    token_ids, probabilities = distribution(logits, given)
    draws = 20_000
    drawn = np.array([sample(logits, given, position, [1], []) for position in range(draws)])
    for token_id, probability in zip(token_ids, probabilities, strict=True):
        share = (drawn == token_id).mean()
        assert abs(share - probability) < 5 * (probability * (1 - probability) / draws) ** 0.5
    assert set(drawn) <= set(token_ids.tolist())


def test_the_random_number_is_fixed_for_ever() -> None:
    # Another number here means that a rolling upgrade changes tokens in the middle of requests.
    drawn = [round(uniform(7, position), 6) for position in range(3)]
    assert drawn == [0.872073, 0.87345, 0.652432]
    assert 0 <= uniform(2**64 - 1, 2**40) < 1


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    logits[[30, 20]] = 5.0
    assert sample(logits, params(temperature=0.0), 0, [1], []) == 20
    assert sample(logits, params(top_k=1), 0, [1], []) == 20


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    token_ids, _ = distribution(np.zeros(VOCABULARY, dtype=np.float32), params(top_k=7))
    assert token_ids.tolist() == list(range(7))


def test_top_p_reaches_past_the_first_candidates_in_a_flat_distribution() -> None:
    logits = np.random.default_rng(0).normal(0, 0.01, 5000).astype(np.float32)
    token_ids, probabilities = distribution(logits, params(top_p=0.9))
    assert 4000 < len(token_ids) < 4700
    assert 0.9 <= probabilities.sum() < 0.901


def test_presence_and_frequency_count_output_tokens_only() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    given = params(presence_penalty=0.5, frequency_penalty=0.25)
    adjusted = adjusted_logits(logits, given, 3, [1, 1, 2], [2, 2, 3])
    assert adjusted[[1, 2, 3]].tolist() == [0.0, -1.0, -0.75]


def test_a_bias_is_added_before_penalties_and_changes_no_logprob(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        logits = random_logits(chance.randrange(2**32))
        bias = {chance.randrange(VOCABULARY): chance.uniform(-100, 100) for _ in range(20)}
        seen = [chance.randrange(VOCABULARY) for _ in range(9)]
        expected = logits.copy()
        for token_id, added in bias.items():
            expected[token_id] += np.float32(added)
        for token_id in set(seen):
            expected[token_id] *= 1.5 if expected[token_id] < 0 else 1 / 1.5
            expected[token_id] -= 0.5 * seen.count(token_id) + 0.25
        given = params(
            temperature=0.0,
            logit_bias=tuple(bias.items()),
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            top_logprobs=1,
        )
        before = logits.copy()
        adjusted = adjusted_logits(logits, given, 9, [], seen)
        np.testing.assert_allclose(adjusted, expected, rtol=1e-5, atol=1e-5)
        drawn = draw(logits, given, 9, [], seen)
        assert drawn.token_id == int(np.argmax(adjusted))
        assert drawn.logprobs == token_logprobs(before, drawn.token_id, 1)
        np.testing.assert_array_equal(logits, before)


def test_a_bias_chooses_among_the_tokens_that_a_grammar_allows() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    allowed = np.zeros(VOCABULARY, np.bool_)
    allowed[[5, 6]] = True
    for temperature in (0.0, 1.0):
        given = params(temperature=temperature, logit_bias=((4, 100.0), (6, 50.0), (5, -100.0)))
        assert sample(logits, given, 0, [1], [], allowed) == 6
        banned = params(temperature=temperature, logit_bias=((6, -100.0), (5, -100.0)))
        assert sample(logits, banned, 0, [1], [], allowed) in (5, 6)


def test_end_ids_cannot_be_drawn_before_min_tokens() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    logits[3] = 50.0
    given = params(temperature=0.0, min_tokens=2, end_ids=(3,))
    assert sample(logits, given, 0, [1], []) != 3
    assert sample(logits, given, 1, [1], [0]) != 3
    assert sample(logits, given, 2, [1], [0, 0]) == 3


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-10, 100.0])
def test_extreme_temperatures_still_draw_a_token(temperature: float) -> None:
    token_id = sample(random_logits(2), params(temperature=temperature), 0, [1], [])
    assert 0 <= token_id < VOCABULARY
    if temperature < 1:
        assert token_id == int(np.argmax(random_logits(2)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; use 1 to 90"),
        ({"max_tokens": -1}, "max_tokens is -1; use 1 to 90"),
        ({"max_tokens": 91}, "maximum context length is 100 tokens"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 21}, "min_tokens is 21; use 0 to max_tokens (20)"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; use -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"end_ids": (VOCABULARY,)}, "end id 500 is outside the vocabulary"),
        ({"end_ids": tuple(range(65))}, "65 end ids; use at most 64"),
        ({"stop_words": ("a",) * 33}, "stop_words has 33 words; use at most 32"),
        ({"stop_words": ("é" * 129,)}, "has 258 bytes; use at most 256"),
        ({"stop_words": ("",)}, "stop_words[0] is empty"),
        ({"logit_bias": ((VOCABULARY, 1.0),)}, "logit_bias has token 500, outside the vocabulary"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias has token -1, outside the vocabulary"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias of token 1 is 100.5; use -100 to 100"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias of token 1 is nan"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias has 1,025 tokens; send at most 1,024"),
        ({"guide": "{}"}, "guided_json needs an end token"),
        ({"guide": "x" * 65_537, "end_ids": (1,)}, "guided_json has 65,537 bytes"),
        (
            {"guide": "x" * 16_385, "guide_kind": GRAMMAR, "end_ids": (1,)},
            "guided_decoding_guide has 16,385 bytes; send at most 16,384",
        ),
    ],
)
def test_each_broken_limit_is_named_with_its_remedy(values: dict[str, Any], words: str) -> None:
    [problem] = params(**values).problems(LIMITS)
    assert words in problem


def test_all_problems_come_at_once() -> None:
    given = params(max_tokens=0, temperature=float("nan"), top_p=2.0, stop_words=("",))
    assert len(given.problems(LIMITS)) == 4


def test_a_prompt_that_fills_the_context_says_how_long_it_may_be() -> None:
    [problem] = params().problems(SamplingLimits(100, 100, VOCABULARY))
    assert "shorten it to at most 99" in problem


def test_a_good_request_has_no_problems() -> None:
    assert params(top_k=5000, stop_words=("\n\n",), end_ids=(0, 499)).problems(LIMITS) == []


def test_the_largest_logits_of_all_rows_are_what_greedy_requests_draw() -> None:
    logits = np.stack([np.round(random_logits(seed)) for seed in range(40)])  # many are equal
    asked = [(params(temperature=0.0, end_ids=(3,)), position, None) for position in range(40)]
    drawn = [
        draw(row, given, at, [], []).token_id
        for row, (given, at, _) in zip(logits, asked, strict=True)
    ]
    assert largest_rows(logits, asked) == drawn


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"logit_bias": ((3, 1.0),)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"top_logprobs": 0},
        {"min_tokens": 5, "end_ids": (3,)},
    ],
)
def test_one_row_that_wants_more_than_its_largest_logit_is_drawn_by_itself(
    values: dict[str, Any],
) -> None:
    logits = np.stack([random_logits(seed) for seed in range(2)])
    greedy = params(temperature=0.0)
    asked = [(greedy, 4, None), (replace(greedy, **values), 4, None)]
    assert largest_rows(logits, asked) is None
