"""The loader of published traces: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from loadtest.replay.reuse import leading_hits
from loadtest.replay.trace import TraceError, read_trace

DATA = Path(__file__).parents[2] / "data"
TRACES = Path(__file__).parents[4] / "shared" / "traces"
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}


def block_hits(chains: Iterable[Sequence[int]]) -> tuple[int, int]:
    """(hits, references) of an unlimited cache over whole chains of hash ids."""
    seen: set[int] = set()
    hits = references = 0
    for chain in chains:
        hits += leading_hits(chain, seen)
        references += len(chain)
        seen.update(chain)
    return hits, references


def test_hits_and_references_of_whole_chains() -> None:
    assert block_hits([[0, 1], [0, 1, 2], [0, 3], []]) == (3, 7)


def write(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def test_a_row_is_read_in_the_units_of_the_trace(tmp_path: Path) -> None:
    (row,) = read_trace(write(tmp_path, GOOD | {"timestamp": 1500}))
    assert (row.line, row.timestamp_ms, row.input_tokens, row.output_tokens, row.hash_ids) == (
        1, 1500, 600, 5, (7, 8),
    )  # fmt: skip


def test_fields_of_other_tools_and_empty_lines_are_left_alone(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, GOOD | {"session_id": "a", "delay": 3}, "", GOOD))
    assert [row.line for row in rows] == [1, 3]


def test_rows_come_in_order_of_arrival_and_ties_keep_their_order(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, *(GOOD | {"timestamp": t} for t in (5, 1.5, 5, 0))))
    assert [row.line for row in rows] == [4, 2, 1, 3]


def test_only_the_first_requests_are_read_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD, "this line is never reached")
    assert len(read_trace(path, requests_max=2)) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{nonsense", "not JSON"),
        ([1, 2], "expected a JSON object, found list"),
        (GOOD | {"timestamp": -1}, "timestamp must be milliseconds >= 0, found -1"),
        (GOOD | {"timestamp": True}, "timestamp must be"),
        ('{"timestamp": NaN}', "timestamp must be milliseconds >= 0, found nan"),
        (GOOD | {"input_length": 0}, "input_length must be a whole number >= 1, found 0"),
        (GOOD | {"output_length": 1.5}, "output_length must be a whole number >= 0, found 1.5"),
        (GOOD | {"hash_ids": "7"}, "hash_ids must be a list, found '7'"),
        (GOOD | {"hash_ids": [7, -8]}, "hash_ids[1] must be a whole number >= 0, found -8"),
        (GOOD | {"hash_ids": [7]}, "input_length 600 needs 2 hash_ids of 512 tokens, found 1"),
        ({"timestamp": 0}, "input_length must be a whole number >= 1, found nothing"),
    ],
)
def test_a_wrong_line_is_refused_with_its_place_and_reason(
    tmp_path: Path, row: object, said: str
) -> None:
    path = write(tmp_path, GOOD, row)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert said in str(caught.value)


def test_all_mistakes_of_a_line_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"timestamp must be .*; input_length must be .*"):
        read_trace(write(tmp_path, GOOD | {"timestamp": None, "input_length": "9"}))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the trace is empty"):
        read_trace(write(tmp_path))


@pytest.mark.parametrize(
    ("name", "hits", "references"),
    [("conversation_turns.jsonl", 200, 300), ("synthetic_turns.jsonl", 265, 417)],
)
def test_the_committed_extracts_share_what_their_readme_says(
    name: str, hits: int, references: int
) -> None:
    assert block_hits(row.hash_ids for row in read_trace(DATA / name)) == (hits, references)


@pytest.mark.parametrize(
    ("name", "requests", "references", "hit_percent"),
    [
        ("conversation_trace.jsonl", 12_031, 288_500, 36.6),
        ("synthetic_trace.jsonl", 3_993, 121_877, 64.0),
        ("toolagent_trace.jsonl", 23_608, None, None),
        ("mooncake_trace.jsonl", None, None, None),
    ],
)
def test_the_published_traces_have_the_published_reuse(
    name: str, requests: int | None, references: int | None, hit_percent: float | None
) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not in {TRACES.parent.name}/traces beside this repository")
    rows = read_trace(TRACES / name)
    hits, seen = block_hits(row.hash_ids for row in rows)
    assert requests in (None, len(rows)) and references in (None, seen)
    assert hit_percent in (None, round(100 * hits / seen, 1))
