"""Requests of a trace in blocks of an engine, at the scale at which a replay sends them."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.replay.prompts import TokenSource, plan
from loadtest.replay.trace import read_trace
from loadtest.simulator.block_cache import key_of
from loadtest.simulator.cluster.job import offered_of
from mooncake_store.block_keys import block_keys, chain_seed

TURNS = Path(__file__).parents[2] / "data" / "conversation_turns.jsonl"
SEED = chain_seed("any")


@pytest.mark.parametrize("scale", [1.0, 0.0625, 0.1, 0.013])
@pytest.mark.parametrize("block_tokens", [16, 64, 512])
def test_a_scaled_trace_shares_the_blocks_that_its_prompts_share(
    scale: float, block_tokens: int
) -> None:
    rows = read_trace(TURNS)
    sent = plan(rows, TokenSource(50_000, (), 3), scale, 1.0)
    names: dict[bytes, int] = {}
    keys = [
        [
            names.setdefault(key, len(names))
            for key in block_keys(one.prompt_ids, block_tokens, SEED)
        ]
        for one in sent
    ]
    offered = offered_of(rows, block_tokens, scale)
    names = {}
    assert keys == [[names.setdefault(key, len(names)) for key in one.keys] for one in offered]
    assert [one.prompt_tokens for one in offered] == [len(one.prompt_ids) for one in sent]
    assert [one.output_tokens for one in offered] == [one.output_tokens for one in sent]
    assert [one.at_s for one in offered] == pytest.approx([one.due_s for one in sent])


def test_unscaled_keys_are_those_of_the_trace_and_the_first_request_comes_at_once() -> None:
    rows = read_trace(TURNS)[5:]
    offered = offered_of(rows)
    assert offered[0].at_s == 0.0 and rows[0].timestamp_ms > 0
    assert offered[0].keys == [key_of(one) for one in rows[0].hash_ids[: len(offered[0].keys)]]
