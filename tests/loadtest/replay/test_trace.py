"""The loader of published traces: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.replay.reuse import leading_hits
from loadtest.replay.trace import LINE_BYTES_MAX, TraceError, read_trace, scaled_lengths

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
        1,
        1500,
        600,
        5,
        (7, 8),
    )


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
        (GOOD | {"hash_ids": [7, -8]}, "hash_ids[1] must be a whole number >= 0"),
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


def lines_of(*rows: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.jsonl"])
def test_a_gzip_trace_is_read_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines_of(GOOD)) + gzip.compress(lines_of(GOOD, GOOD)))
    assert [row.line for row in read_trace(path)] == [1, 2, 3]


def test_a_byte_order_mark_of_utf_8_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines_of(GOOD))
    assert len(read_trace(path)) == 1


DIGITS_400 = "9" * 400


@pytest.mark.parametrize(
    ("data", "line", "reason", "remedy"),
    [
        (b"", 1, "the trace is empty", "one JSON object a line"),
        (gzip.compress(b""), 1, "the trace is empty", "one JSON object a line"),
        (lines_of(GOOD).decode().encode("utf-16"), 1, "UTF-16", "iconv -f UTF-16"),
        (lines_of(GOOD).decode().encode("utf-16-le"), 1, "UTF-16", "iconv -f UTF-16"),
        (lines_of(GOOD).decode().encode("utf-32"), 1, "UTF-32", "iconv -f UTF-32"),
        (lines_of(GOOD) + '{"name": "gr\xf6\xdfe"}'.encode("latin-1"), 2, "not UTF-8", "iconv"),
        (gzip.compress(lines_of(GOOD, GOOD))[:-9], 3, "gzip", "download it again"),
        (gzip.compress(lines_of(GOOD))[:12], 1, "gzip", "download it again"),
        (b"\x1f\x8b" + bytes(40), 1, "gzip", "download it again"),
        (gzip.compress(random.Random(1).randbytes(99)), 1, "not UTF-8", "iconv"),
        (b"[" * 100_000 + b"]" * 100_000, 1, "nested too deep", "one JSON object a line"),
        (b'{"timestamp": ' + b'{"a":' * 100_000, 1, "nested too deep", "one JSON object a line"),
        (b'{"timestamp": %s}' % (b"9" * 5_000), 1, "digits", "one JSON object a line"),
        (lines_of(GOOD) + b" " * (LINE_BYTES_MAX + 1), 2, "longer than", "one JSON object a line"),
    ],
    ids=[
        "empty",
        "empty-gzip",
        "utf-16",
        "utf-16-without-mark",
        "utf-32",
        "latin-1",
        "cut-gzip",
        "short-gzip",
        "no-gzip",
        "gzip-of-noise",
        "deep-list",
        "deep-object",
        "digits",
        "long-line",
    ],
)
def test_bytes_that_are_no_trace_are_one_line_with_place_reason_and_remedy(
    tmp_path: Path, data: bytes, line: int, reason: str, remedy: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    said = str(caught.value)
    assert said.startswith(f"{path}:{line}: ")
    assert reason in said and remedy in said
    assert "\n" not in said and len(said) < len(str(path)) + 300


@pytest.mark.parametrize("name", ["timestamp", "input_length", "output_length", "hash_ids"])
@pytest.mark.parametrize("number", [DIGITS_400, "1e999", "-" + DIGITS_400, f"[{DIGITS_400}]"])
def test_a_number_too_large_is_named_by_its_field(tmp_path: Path, name: str, number: str) -> None:
    fields = {key: json.dumps(value) for key, value in GOOD.items()} | {name: number}
    path = write(tmp_path, "{" + ", ".join(f'"{k}": {v}' for k, v in fields.items()) + "}")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    said = str(caught.value)
    assert said.startswith(f"{path}:1: ") and name in said
    assert len(said) < len(str(path)) + 300


def test_a_folder_and_a_file_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    unreadable = Path("/proc/self/mem")  # opens, and the first read fails even for root
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / ("x" * 300), unreadable):
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        said = str(caught.value)
        assert said.startswith(f"{path}: cannot be read: ") and "\n" not in said
        assert "name a file" in said


def rows_or_refusal(path: Path, data: bytes) -> None:
    """Every outcome but rows and a line for the terminal is a failure."""
    path.write_bytes(data)
    try:
        rows = read_trace(path)
    except TraceError as error:
        said = str(error)
        assert said.startswith(f"{path}:") and "\n" not in said
        assert len(said) < len(str(path)) + 1_000
        said.encode()  # a terminal can print it
    else:
        for row in rows:
            scaled_lengths(row, 0.5)


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_rows_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, is_gzip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    rows_or_refusal(path, gzip.compress(data) if is_gzip else data)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.just(int(DIGITS_400)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.sampled_from([*GOOD]), JSON_VALUES)
@example("hash_ids", ["\ud800"])
def test_a_random_value_in_a_field_is_a_row_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    rows_or_refusal(path, lines_of(GOOD, GOOD | {name: value}))


@given(st.data())
def test_random_edits_of_a_trace_are_rows_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes cut out or put in, before and after compression."""
    text = lines_of(GOOD, GOOD | {"timestamp": 7, "name": "größe"})
    for step in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut, new = data.draw(st.integers(0, 9)), data.draw(st.binary(max_size=9))
        text = text[:at] + new + text[at + cut :]
        if step == 0 and data.draw(st.booleans()):
            text = gzip.compress(text)
    rows_or_refusal(tmp_path_factory.getbasetemp() / "fuzzed.jsonl", text)


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
