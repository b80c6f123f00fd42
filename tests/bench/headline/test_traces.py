"""Scaling a trace: whole conversations, their reuse, lengths, times, and the ids of a cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.headline import traces
from bench.headline.__main__ import read_traces
from bench.headline.measure import CONVERSATION, SYNTHETIC
from loadtest.replay.trace import TraceRow

TRACES = Path(__file__).parents[4] / "shared" / "traces"
SYSTEM_PROMPT = 0
HALF = 0.5  # a block of more than half of these few requests is common


def row(line: int, at_ms: float, blocks: tuple[int, ...], output_tokens: int = 80) -> TraceRow:
    return TraceRow(line, at_ms, 512 * len(blocks), output_tokens, blocks)


def two_turns(first_line: int, block: int, at_ms: float) -> list[TraceRow]:
    """A conversation of two turns after the common system prompt."""
    first = row(first_line, at_ms, (SYSTEM_PROMPT, block))
    return [first, row(first_line + 1, at_ms + 3_000, (SYSTEM_PROMPT, block, block + 1))]


ROWS = sorted(
    (one for n in range(6) for one in two_turns(1 + 2 * n, 10 + 2 * n, 3_000.0 * (n // 2))),
    key=lambda one: one.timestamp_ms,
)


def test_a_shared_system_prompt_does_not_join_two_conversations() -> None:
    groups = traces.conversations(ROWS, HALF)
    assert [len(group) for group in groups] == [2] * 6


def test_a_request_of_common_blocks_only_is_a_conversation_of_its_own() -> None:
    rows = [row(line, 0.0, (SYSTEM_PROMPT,)) for line in (1, 2, 3)]
    assert len(traces.conversations(rows, HALF)) == 3


def test_chosen_requests_are_whole_conversations_with_their_reuse() -> None:
    found = traces.chosen(ROWS, 6, 8_192, seed=3, common_share=HALF)
    own = [block for request in found for block in request.block_ids[1:2]]
    assert len(found) == 6
    assert all(own.count(block) == 2 for block in own)
    # Five prompts find the system prompt; each second turn finds its first turn as well.
    assert traces.reusable_share(found) == pytest.approx((5 + 3) * 32 / (32 * (3 * 2 + 3 * 3)))


def test_the_same_seed_chooses_the_same_requests_and_another_seed_others() -> None:
    def choose(seed: int) -> list[traces.TraceRequest]:
        return traces.chosen(ROWS, 4, 8_192, seed, HALF)

    assert choose(1) == choose(1)
    assert len({tuple(choose(seed)) for seed in range(8)}) > 1


def test_lengths_are_divided_and_blocks_are_kept() -> None:
    long = TraceRow(1, 0.0, 14 * 512 - 410, 500, tuple(range(14)))
    [found] = traces.chosen([long], 1, 8_192, seed=1)
    assert (found.prompt_tokens, found.output_tokens) == (round((14 * 512 - 410) / 32), 31)
    [short] = traces.chosen([TraceRow(1, 0.0, 513, 1, (0, 1))], 1, 8_192, seed=1)
    assert (short.prompt_tokens, short.output_tokens) == (17, 1)  # a token of the second block


def test_a_conversation_beyond_the_context_is_left_out_as_a_whole() -> None:
    rows = [*ROWS, row(90, 0.0, (70, 71)), row(91, 3_000.0, (70, 71), output_tokens=160_000)]
    found = traces.chosen(rows, 12, 8_192, seed=1, common_share=HALF)
    assert all(70 not in request.block_ids for request in found)


def test_too_few_conversations_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"only 12 requests.*lower --requests"):
        traces.chosen(ROWS, 13, 8_192, seed=1, common_share=HALF)


def test_requests_arrive_in_order_at_the_offered_mean_rate() -> None:
    found = traces.at_rate(traces.chosen(ROWS, 12, 8_192, 1, HALF), 2.0)
    times_s = [request.at_s for request in found]
    assert times_s == sorted(times_s)
    assert (times_s[0], times_s[-1]) == (0.0, pytest.approx(11 / 2.0))


def test_requests_of_one_timestamp_are_spread_until_the_next_one() -> None:
    rows = [row(line, at, (line,)) for line, at in ((1, 0.0), (2, 0.0), (3, 3_000.0))]
    found = traces.chosen(rows, 3, 8_192, seed=1)
    assert [request.at_s for request in found] == pytest.approx([0.0, 1.0, 2.0])


def test_prompts_of_two_cells_share_no_block() -> None:
    requests = traces.chosen(ROWS, 4, 8_192, 1, HALF)
    cells = [traces.at_rate(requests, 1.0, cell) for cell in (1, 2)]
    blocks = [{block for request in cell for block in request.block_ids} for cell in cells]
    assert not blocks[0] & blocks[1]


def test_the_file_has_the_fields_that_the_client_reads() -> None:
    requests = traces.at_rate(traces.chosen(ROWS, 2, 8_192, 1, HALF), 0.5)
    last = json.loads(traces.to_lines(requests).splitlines()[-1])
    assert set(last) == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert last["timestamp"] == 2.0


def test_probes_share_no_block() -> None:
    found = traces.probes((32, 64), 2, 16)
    assert [request.prompt_tokens for request in found] == [32, 32, 64, 64]
    blocks = [block for request in found for block in request.block_ids]
    assert len(blocks) == len(set(blocks))


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not here")
def test_the_published_traces_keep_their_reuse(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    found = read_traces(TRACES, tmp_path, 120, seed=1)
    for name, reused, mean_tokens in ((CONVERSATION, 0.25, 250), (SYNTHETIC, 0.4, 250)):
        requests = found[name]
        assert len(requests) == 120
        assert traces.reusable_share(requests) > reused
        assert sum(request.prompt_tokens for request in requests) / 120 > mean_tokens
        assert all(request.prompt_tokens + request.output_tokens <= 8_192 for request in requests)
