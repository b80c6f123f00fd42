"""Times between tokens, as the benchmark of what serving adds takes them."""

from __future__ import annotations

import numpy as np
import pytest

from backends.text.tokenizer import Tokenizer
from loadtest.bench.overhead.__main__ import text_of
from loadtest.bench.overhead.bare_engine import CHECKPOINT, BareEngine
from loadtest.bench.overhead.served import TokenArrivals
from loadtest.replay.prompts import TokenSource


def test_tokens_of_one_message_share_the_time_since_the_one_before() -> None:
    arrivals = TokenArrivals(0.0, [1.0, 2.0, 2.0, 2.5, 9.0], 4)
    assert arrivals.ttft_s == 1.0
    assert arrivals.intervals_s(1.0, 3.0) == [0.5, 0.5, 0.5]
    assert arrivals.intervals_s(1.5, 9.0) == [0.5, 6.5]


def test_a_prompt_in_the_same_batches_makes_their_steps_longer_and_gives_its_pages_back() -> None:
    engine = BareEngine(64, 1, kv_tokens=2 * (128 + 64) + 2_048)
    ids = np.arange(20, 84, dtype=np.int32)
    long = np.tile(ids, 32)
    for _ in range(2):  # the pages suffice for one round only
        alone = engine.intervals_s([ids, ids], 4, None, 512)
        beside = engine.intervals_s([ids, ids], 64, long, 512)
        assert len(alone) == 4 and len(beside) == -(-len(long) // 512)
        assert sum(beside) > sum(alone), "512 tokens more in each of its steps"


def test_streams_are_as_many_and_as_long_as_asked_for() -> None:
    engine = BareEngine(64, 1, kv_tokens=2 * 128)
    ids = np.arange(20, 52, dtype=np.int32)
    times_s = engine.streams_s([ids, ids], 8)
    assert [len(each) for each in times_s] == [8, 8]
    assert all(each == pytest.approx(sorted(each)) for each in times_s)


def test_a_text_is_read_as_about_as_many_tokens_as_its_prompt_has() -> None:
    tokenizer = Tokenizer.load(CHECKPOINT)
    source = TokenSource(2_048, [0, 1, 2], seed=123)
    for number in range(4):
        text = text_of(tokenizer, source.fresh(number, 512))
        assert 512 <= len(tokenizer.encode(text)) <= 516
