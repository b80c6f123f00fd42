"""The papers' data sets: their lengths, what of them is shared, and that seeds repeat them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from bench.paper.figures.poisson import requests_of
from loadtest.client.server import ServerDescription
from loadtest.replay.datasets import (
    DATA_SETS,
    PREFIXES,
    REQUESTS,
    DataSet,
    drawn,
    endless,
    poisson_rows,
    rows_of,
)
from loadtest.replay.prompts import TokenSource, plan
from loadtest.replay.reuse import ideal_cached_tokens
from loadtest.replay.trace import TraceError, TraceSettings, scaled_lengths
from loadtest.simulator.cluster.job import offered_of

# The arXiv report, Table 2: prompt, answer, cached share.
PAPER = {
    "arxiv": (8_088, 229, 0.0), "l-eval": (19_019, 72, 0.8), "16k": (16_384, 512, 0.5),
    "32k": (32_768, 512, 0.5), "64k": (65_536, 512, 0.5), "128k": (131_072, 512, 0.5),
}  # fmt: skip
SERVER = ServerDescription(64, 200_000, 2_048)
DATA_SETS_OF_ALL = pytest.mark.parametrize("data_set", DATA_SETS.values(), ids=lambda one: one.name)


def test_all_data_sets_of_the_papers_table_are_there() -> None:
    assert DATA_SETS.keys() == PAPER.keys()


@DATA_SETS_OF_ALL
@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 16])
def test_mean_lengths_are_the_papers_at_any_scale(data_set: DataSet, scale: float) -> None:
    prompt_tokens, output_tokens, _ = PAPER[data_set.name]
    rows = list(itertools.islice(endless(data_set, 1), 20))
    lengths = [scaled_lengths(row, scale) for row in rows]
    mean = np.mean([one.prompt_tokens for one in lengths])
    assert mean == pytest.approx(prompt_tokens * scale, rel=0.01)
    mean = np.mean([one.output_tokens for one in lengths])
    assert mean == pytest.approx(output_tokens * scale, rel=0.02, abs=0.5)


@DATA_SETS_OF_ALL
def test_the_papers_share_of_each_prompt_is_cached_once_its_prefixes_are_there(
    data_set: DataSet, seed: int
) -> None:
    """By the tokens themselves, as a server's cache of 64-token blocks finds them."""
    scale = 1 / 16
    rows, brought = poisson_rows(data_set, 1.0, 12, seed)
    source = TokenSource.of_server(SERVER, seed % 2**32)
    prompts = [one.prompt_ids for one in plan(rows, source, scale, 1.0)]
    cached = ideal_cached_tokens(prompts, SERVER.block_tokens)[brought:]
    assert brought == (PREFIXES if data_set.cached_share else 0)
    for tokens, prompt in zip(cached, prompts[brought:], strict=True):
        # Blocks of 512 tokens are shared as wholes, and a server finds only full blocks of its own.
        lost = (512 * scale + SERVER.block_tokens) / len(prompt)
        share = tokens / len(prompt)
        assert data_set.cached_share - lost <= share <= data_set.cached_share
    alone = ideal_cached_tokens([prompts[brought]], SERVER.block_tokens)
    assert alone == [0], "without its prefix nothing is"


@pytest.mark.parametrize("name", ["16k", "32k", "64k", "128k"])
def test_half_of_a_long_prompt_is_shared_exactly(name: str) -> None:
    data_set = DATA_SETS[name]
    first, other = data_set.request(0, 3), data_set.request(1, 3)
    half = len(first.hash_ids) // 2
    assert first.hash_ids[:half] == other.hash_ids[:half] == data_set.prefix(3)
    assert not set(first.hash_ids[half:]) & set(other.hash_ids)
    assert half * 512 == data_set.prompt_tokens / 2


@DATA_SETS_OF_ALL
def test_a_simulated_and_a_served_run_are_the_same_requests(data_set: DataSet, seed: int) -> None:
    """Offered to the simulated nodes, sent by a replay, and taken by users one after the other."""
    simulated, first = requests_of(data_set, 0.5, 30, seed)
    rows, brought = poisson_rows(data_set, 0.5, 30, seed)
    replayed = offered_of(rows)[brought:]
    assert [one.keys for one in simulated[first:]] == [one.keys for one in replayed]
    of_users = list(itertools.islice(endless(data_set, seed), REQUESTS))
    assert of_users == [
        data_set.request(number, prefix) for number, prefix in enumerate(drawn(seed, REQUESTS)[1])
    ]
    whole, _ = requests_of(data_set, 0.5, REQUESTS, seed)
    taken = offered_of(of_users)
    assert [one.keys for one in whole[-REQUESTS:]] == [one.keys for one in taken]


@DATA_SETS_OF_ALL
def test_no_two_requests_are_alike_however_many_are_taken(data_set: DataSet) -> None:
    rows = list(itertools.islice(endless(data_set, 0), 2 * REQUESTS + 7))
    own = [set(row.hash_ids[data_set.shared_blocks :]) for row in rows]
    assert sum(map(len, own)) == len(set().union(*own)), "no block but a prefix's comes twice"
    if data_set.prefixes:
        assert {row.hash_ids[0] for row in rows} == {
            data_set.prefix(number)[0] for number in range(PREFIXES)
        }


def test_seeds_decide_arrivals_and_prefixes_and_repeat_them() -> None:
    data_set = DATA_SETS["16k"]
    assert poisson_rows(data_set, 2.0, 40, 7) == poisson_rows(data_set, 2.0, 40, 7)
    assert poisson_rows(data_set, 2.0, 40, 7) != poisson_rows(data_set, 2.0, 40, 8)
    rows, brought = poisson_rows(data_set, 4.0, 400, 7, every_s=2.0)
    assert rows[brought].timestamp_ms >= brought * 2_000.0
    last_s = rows[-1].timestamp_ms / 1e3 - brought * 2.0
    assert last_s == pytest.approx(400 / 4.0), "as many come as the rate says"


def test_a_data_set_stands_where_a_traces_file_could(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(TraceSettings(Path("l-eval"), requests_max=5, seed=3))
    assert len(rows) == PREFIXES + 5 and rows[-1].input_tokens == 19_019
    assert len(rows_of(TraceSettings(Path("arxiv")))) == REQUESTS
    with pytest.raises(TraceError, match="no-such-set: cannot be read: No such file"):
        rows_of(TraceSettings(Path("no-such-set")))
    line = '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}'
    (tmp_path / "arxiv").write_text(line)
    monkeypatch.chdir(tmp_path)
    [row] = rows_of(TraceSettings(Path("arxiv")))
    assert row.input_tokens == 3, "a file of that name is a file"
