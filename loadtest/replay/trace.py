"""Reads the request traces that the Mooncake project published (JSON lines, plain or gzip).

Each line is one request: its arrival (`timestamp`, ms), the lengths of its prompt and its answer
(`input_length`, `output_length`, tokens), and one `hash_ids` entry for each 512-token block of the
prompt. An id names the block *and its whole prefix*, so two requests that share their first k ids
share k blocks. Fields that other tools add (`session_id`, `delay`, ...) are ignored.

At a scale, a prompt keeps all of its blocks, and its last block is cut so that the prompt has
`round(input_length x length_scale)` tokens. Where rounding makes that impossible (28 blocks of 51
tokens cannot hold 1,434), the last block keeps between one token and all: sharing comes first.

An invalid line is refused with its position, `FILE:LINE`, and the reason, because a silently
repaired trace would be another trace. An unreadable file is refused in the same way.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import math
import reprlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
HASH_ID_MAX = 2**64 - 1
COUNT_MAX = 2**31 - 1  # tokens of a prompt or of an answer
TIMESTAMP_MS_MAX = 2**53  # a float represents every whole number up to this one
LINE_BYTES_MAX = 2**24
GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARKS = {  # UTF-32 first: its mark begins with that of UTF-16
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    # UTF-16 without a mark is recognised by the zero beside an ASCII character.
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"\0{", b"{\0"),
}
EXPECTED = "expected one JSON object a line"


class TraceError(ValueError):
    """The trace file is wrong; the message begins with FILE:LINE."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace, in the trace's own units (nothing scaled)."""

    line: int
    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScaledLengths:
    """A row's lengths at some scale: `block_tokens` for each id, less in the last."""

    block_tokens: int
    prompt_tokens: int
    output_tokens: int

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def scaled_lengths(row: TraceRow, length_scale: float) -> ScaledLengths:
    assert length_scale > 0, f"length_scale {length_scale} must be positive"
    block_tokens = max(1, round(TRACE_BLOCK_TOKENS * length_scale))
    blocks = len(row.hash_ids)
    prompt_tokens = round(row.input_tokens * length_scale)
    prompt_tokens = min(max(prompt_tokens, (blocks - 1) * block_tokens + 1), blocks * block_tokens)
    return ScaledLengths(
        block_tokens, prompt_tokens, max(1, round(row.output_tokens * length_scale))
    )


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Which part of which trace, its speed and scale, and the seed of its tokens."""

    path: Path
    requests_max: int | None = None
    length_scale: float = 1.0
    speed: float = 1.0
    seed: int = 0


def read_trace(path: Path, requests_max: int | None = None) -> list[TraceRow]:
    """The first `requests_max` rows of `path` (all by default), in order of arrival. Raises
    TraceError for everything that is wrong with the file, and nothing else. Rows are sorted by
    timestamp, stably: the published files are sorted, but a concatenation of two recordings is
    not."""
    assert requests_max is None or requests_max > 0
    rows: list[TraceRow] = []
    for row in _rows(path):
        rows.append(row)
        if len(rows) == requests_max:
            break
    if not rows:
        raise TraceError(f"{path}:1: the trace is empty; {EXPECTED}")
    return sorted(rows, key=lambda row: row.timestamp_ms)


def _rows(path: Path) -> Iterator[TraceRow]:
    line = 0
    try:
        for line, text in enumerate(_lines(path), start=1):
            if len(text) <= LINE_BYTES_MAX and not text.strip():
                continue
            problems: list[str] = []
            row = _parse(text, line, problems)
            if row is None:
                raise TraceError(f"{path}:{line}: " + "; ".join(problems))
            yield row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        broken = f"the gzip data breaks off or is damaged ({error})"
        raise TraceError(f"{path}:{line + 1}: {broken}; compress or download it again") from None
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise TraceError(f"{path}: {reason}; name a file of JSON lines") from None


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain or gzip file; its first bytes decide."""
    with contextlib.ExitStack() as stack:
        file: io.BufferedIOBase = stack.enter_context(path.open("rb"))
        if file.peek(2).startswith(GZIP_MAGIC):
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        # A line that is too long is cut here, and `_decoded` refuses it by its length.
        while text := file.readline(LINE_BYTES_MAX + 1):
            yield text


def _parse(text: bytes, line: int, problems: list[str]) -> TraceRow | None:
    """The row in `text`, or None with every mistake of the line added to `problems`."""
    if (decoded := _decoded(text, line, problems)) is None:
        return None
    try:
        fields = json.loads(decoded)
    except json.JSONDecodeError as error:
        problems.append(f"not JSON: {error.msg} at column {error.colno}; {EXPECTED}")
        return None
    except RecursionError:
        problems.append(f"its JSON is nested too deep; {EXPECTED}")
        return None
    except ValueError:  # json reads no integer of more than 4,300 digits
        problems.append(f"a number in it has thousands of digits; {EXPECTED}")
        return None
    if not isinstance(fields, dict):
        problems.append(f"expected a JSON object, found {type(fields).__name__}")
        return None
    timestamp_ms = _timestamp(fields, problems)
    input_tokens = _count(fields, "input_length", 1, problems)
    output_tokens = _count(fields, "output_length", 0, problems)
    hash_ids = _hash_ids(fields, problems)
    if not problems:
        blocks = -(-input_tokens // TRACE_BLOCK_TOKENS)
        if len(hash_ids) != blocks:
            problems.append(
                f"input_length {input_tokens} needs {blocks} hash_ids of {TRACE_BLOCK_TOKENS} "
                f"tokens, found {len(hash_ids)}"
            )
    if problems:
        return None
    return TraceRow(line, timestamp_ms, input_tokens, output_tokens, hash_ids)


def _decoded(text: bytes, line: int, problems: list[str]) -> str | None:
    if len(text) > LINE_BYTES_MAX:
        problems.append(f"the line is longer than {LINE_BYTES_MAX:,} bytes; {EXPECTED}")
        return None
    if line == 1:
        for name, marks in BYTE_ORDER_MARKS.items():
            if text.startswith(marks):
                problems.append(f"{name} text; convert it with `iconv -f {name} -t UTF-8`")
                return None
        text = text.removeprefix(codecs.BOM_UTF8)
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{text[error.start]:02x} at column {error.start + 1}"
        problems.append(
            f"not UTF-8: {where}; {EXPECTED}; convert text of another encoding with "
            "`iconv -f ENCODING -t UTF-8`"
        )
        return None


def _timestamp(fields: dict[str, Any], problems: list[str]) -> float:
    value: Any = fields.get("timestamp")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value <= TIMESTAMP_MS_MAX:
        return float(value)
    is_too_late = is_number and TIMESTAMP_MS_MAX < value < math.inf
    wanted = f"at most {TIMESTAMP_MS_MAX} milliseconds" if is_too_late else "milliseconds >= 0"
    problems.append(f"timestamp must be {wanted}, found {_shown(fields, 'timestamp')}")
    return 0.0


def _count(fields: dict[str, Any], name: str, least: int, problems: list[str]) -> int:
    value = fields.get(name)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and least <= value <= COUNT_MAX:
        return int(value)
    wanted = f"a whole number >= {least}"
    if is_whole and value > COUNT_MAX:
        wanted = f"at most {COUNT_MAX} tokens"
    problems.append(f"{name} must be {wanted}, found {_shown(fields, name)}")
    return 0


def _hash_ids(fields: dict[str, Any], problems: list[str]) -> tuple[int, ...]:
    value = fields.get("hash_ids")
    if not isinstance(value, list):
        problems.append(f"hash_ids must be a list, found {_shown(fields, 'hash_ids')}")
        return ()
    for position, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= HASH_ID_MAX:
            wanted = f"a whole number >= 0 and <= {HASH_ID_MAX}"
            problems.append(f"hash_ids[{position}] must be {wanted}, found {_short(item)}")
            return ()
    return tuple(value)


def _shown(fields: dict[str, Any], name: str) -> str:
    return _short(fields[name]) if name in fields else "nothing"


def _short(value: object) -> str:
    """A value of a file may be of any depth and length; its text may not."""
    return reprlib.repr(value)[:60]
