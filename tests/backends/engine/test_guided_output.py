"""The demo model held to a thousand schemas: each is refused by name, or its answers validate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.sampling import Guide
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import InvalidRequest
from bench.harness.generate import generate
from tests.backends.small_tokenizers import DEMO
from tests.backends.text.schemas import schemas
from tests.backends.text.test_guides import (
    END_IDS,
    GUIDES,
    SLOW,
    TOKENIZER,
    check_refusal,
    check_validates,
)

TOGETHER = 16
TOKENS_MAX = 64
PROMPT = TOKENIZER.encode("It is a truth universally acknowledged, that")
MANY = st.lists(schemas(), min_size=TOGETHER, max_size=TOGETHER)


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine.load(DEMO, pages_max=2 * TOGETHER, block_tokens=64)


def answers(engine: TorchEngine, asked: list[dict[str, Any]]) -> tuple[int, int]:
    """How many were refused, and how many were answered to the end."""
    params, guides, followed = list[SamplingParams](), list[Guide](), list[dict[str, Any]]()
    for index, schema in enumerate(asked):
        text = json.dumps(schema)
        try:
            guides.append(GUIDES.guide(text, END_IDS, []))
        except InvalidRequest as error:
            check_refusal(error, schema)
            continue
        temperature = 0.0 if index % 2 else 1.2
        params.append(
            SamplingParams(
                TOKENS_MAX, temperature=temperature, seed=index, end_ids=END_IDS, guide=text
            )
        )
        followed.append(schema)
    outputs = generate(engine, [PROMPT] * len(params), params, slots_max=TOGETHER, guides=guides)
    ended = [
        (TOKENIZER.decode(output), schema)
        for output, schema in zip(outputs, followed, strict=True)
        if output[-1] in END_IDS
    ]
    for text, schema in ended:
        check_validates(text, schema)
    return len(asked) - len(followed), len(ended)


@pytest.mark.slow
@given(MANY)
@settings(max_examples=3, suppress_health_check=SLOW)
def test_some_schemas_are_followed_by_the_demo_model_or_refused(
    engine: TorchEngine, asked: list[dict[str, Any]]
) -> None:
    answers(engine, asked)


@pytest.mark.long
def test_a_thousand_schemas_are_followed_by_the_demo_model_or_refused(engine: TorchEngine) -> None:
    counts = [0, 0, 0]

    @given(MANY)
    @settings(max_examples=63, suppress_health_check=SLOW)
    def ask(asked: list[dict[str, Any]]) -> None:
        refused, ended = answers(engine, asked)
        counts[:] = counts[0] + len(asked), counts[1] + refused, counts[2] + ended

    ask()
    total, refused, ended = counts
    print(f"{total} schemas: {refused} refused, {ended} answered to the end")
    assert total >= 1_000
    assert ended > total / 4, "the test would prove little"
