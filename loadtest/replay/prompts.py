"""Turns the rows of a trace into prompts that share the prefixes of the trace exactly.

Published traces have ids instead of text. Each id becomes the same `round(512 x length_scale)`
tokens wherever it occurs, so a server's prefix cache sees the trace's own reuse at any scale.

Tokens come from Philox, a counter-based generator keyed by (seed, hash id): the same on every
machine, and without the blocks before. The first few tokens of a block spell its id (in base
"vocabulary"), because random tokens alone would let two short blocks coincide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from loadtest.client.protocol import GenerateRequest
from loadtest.client.server import ServerDescription
from loadtest.replay.trace import TraceRow, scaled_lengths

TokenIds = npt.NDArray[np.int32]

BLOCKS_REMEMBERED_MAX = 65_536
LINES_SHOWN_MAX = 10
# ids below 2^32 are distinguished by spelling; larger ones by random tokens as well
SPELLED_ID_BITS = 32


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request and its time. `index` counts in order of arrival, `line` is the trace's line."""

    index: int
    line: int
    due_s: float
    prompt_ids: TokenIds
    output_tokens: int

    def to_send(
        self, request_id: str, *, ignore_eos: bool = True, return_decision: bool = False
    ) -> GenerateRequest:
        """The request for the server; with `ignore_eos` it gets the trace's answer length."""
        return GenerateRequest(
            request_id=request_id,
            input_ids=self.prompt_ids,
            max_tokens=self.output_tokens,
            min_tokens=self.output_tokens if ignore_eos else None,
            end_id=-1 if ignore_eos else None,
            return_decision=return_decision or None,
        )


class TokenSource:
    """Makes the tokens of a block from its id; never a special token."""

    def __init__(
        self, vocabulary_tokens: int, special_token_ids: Iterable[int] = (), seed: int = 0
    ) -> None:
        special = set(special_token_ids)
        usable = [token for token in range(vocabulary_tokens) if token not in special]
        assert len(usable) >= 2, f"{len(usable)} usable token ids cannot tell two blocks apart"
        assert 0 <= seed < 2**64, f"seed {seed} must fit 64 bits"
        self._usable = np.array(usable, dtype=np.int32)
        self._seed = seed
        self._shift = int(np.random.Philox(key=[seed, 0]).random_raw(1)[0]) % len(usable)
        self._spelled_tokens = 1
        while len(usable) ** self._spelled_tokens < 2**SPELLED_ID_BITS:
            self._spelled_tokens += 1
        self._block = lru_cache(maxsize=BLOCKS_REMEMBERED_MAX)(self._make_block)

    @classmethod
    def of_server(cls, server: ServerDescription, seed: int) -> TokenSource:
        return cls(server.vocabulary_tokens, server.special_token_ids, seed)

    def block(self, hash_id: int, block_tokens: int) -> TokenIds:
        """The `block_tokens` tokens that stand for `hash_id`. Read-only: callers share them."""
        return self._block(hash_id, block_tokens)

    def prompt(self, hash_ids: Sequence[int], block_tokens: int, prompt_tokens: int) -> TokenIds:
        assert len(hash_ids) * block_tokens >= prompt_tokens > (len(hash_ids) - 1) * block_tokens
        blocks = [self.block(hash_id, block_tokens) for hash_id in hash_ids]
        return np.concatenate(blocks)[:prompt_tokens]

    def fresh(self, stream: int, tokens: int) -> TokenIds:
        """A prompt of random tokens that no trace and no other `stream` begins with."""
        source = np.random.Philox(key=[self._seed, stream], counter=[0, 0, 0, 1])
        picks = source.random_raw(tokens) % np.uint64(len(self._usable))
        return self._usable[picks.astype(np.int64)]

    def _make_block(self, hash_id: int, block_tokens: int) -> TokenIds:
        raw = np.random.Philox(key=[self._seed, hash_id]).random_raw(block_tokens)
        base = len(self._usable)
        picks = (raw % np.uint64(base)).astype(np.int64)
        rest = hash_id % 2**SPELLED_ID_BITS
        for position in range(min(self._spelled_tokens, block_tokens)):
            rest, digit = divmod(rest, base)
            picks[position] = (digit + self._shift) % base
        block: TokenIds = self._usable[picks]
        block.setflags(write=False)
        return block


def planned_request(
    row: TraceRow, index: int, due_s: float, source: TokenSource, length_scale: float
) -> PlannedRequest:
    lengths = scaled_lengths(row, length_scale)
    prompt = source.prompt(row.hash_ids, lengths.block_tokens, lengths.prompt_tokens)
    return PlannedRequest(index, row.line, due_s, prompt, lengths.output_tokens)


def due_times_s(rows: Sequence[TraceRow], speed: float) -> list[float]:
    """The first row is due at 0 s, the others at the trace's pace x `speed`."""
    assert speed > 0, f"speed {speed} must be positive"
    return [(row.timestamp_ms - rows[0].timestamp_ms) / 1_000.0 / speed for row in rows]


def plan(
    rows: Sequence[TraceRow], source: TokenSource, length_scale: float, speed: float
) -> list[PlannedRequest]:
    return [
        planned_request(row, index, due_s, source, length_scale)
        for index, (row, due_s) in enumerate(zip(rows, due_times_s(rows, speed), strict=True))
    ]


@dataclass(frozen=True, slots=True)
class TooLong:
    """Rows that do not fit the server's context, and the largest scale at which all would."""

    lines: tuple[int, ...]
    context_tokens: int  # of the longest
    context_tokens_max: int  # of the server
    asked_scale: float
    length_scale: float  # at which all fit

    def refusal(self, flag: str) -> str:
        shown = ", ".join(map(str, self.lines[:LINES_SHOWN_MAX]))
        more = len(self.lines) - LINES_SHOWN_MAX
        return (
            f"{len(self.lines)} requests do not fit the server's context of "
            f"{self.context_tokens_max:,} tokens at {flag} {self.asked_scale:g}: lines {shown}"
            f"{f' and {more} more' if more > 0 else ''}; the longest needs "
            f"{self.context_tokens:,} tokens. All fit at {flag} {self.length_scale:g}."
        )


def too_long(
    rows: Sequence[TraceRow], length_scale: float, context_tokens_max: int
) -> TooLong | None:
    """The rows whose prompt and answer together exceed the context; None when all fit."""
    contexts = [scaled_lengths(row, length_scale).context_tokens for row in rows]
    lines = tuple(
        row.line for row, tokens in zip(rows, contexts, strict=True) if tokens > context_tokens_max
    )
    if not lines:
        return None
    fitting = length_scale * context_tokens_max / max(contexts)
    while _longest(rows, _readable(fitting)) > context_tokens_max and fitting > 1e-6:
        # rounding blocks up can still exceed the context; this takes a few steps at most
        fitting *= 0.97
    return TooLong(
        lines=lines,
        context_tokens=max(contexts),
        context_tokens_max=context_tokens_max,
        asked_scale=length_scale,
        length_scale=_readable(fitting),
    )


def _longest(rows: Sequence[TraceRow], length_scale: float) -> int:
    return max(scaled_lengths(row, length_scale).context_tokens for row in rows)


def _readable(scale: float) -> float:
    """`scale` rounded down to two digits, as a person would type it."""
    digits = f"{scale:.12e}"
    return float(digits[:3] + digits[digits.index("e") :])
