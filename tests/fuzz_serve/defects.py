"""Defects planted on purpose, each a mistake somebody could make. Some seed must find every one.

Each replaces one function of the product. Those of `tests/fuzz/defects.py` are about the directory
alone; here they are met from outside, by clients and their tokens.

Not here: the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from backends.engine.batching.batching import PrefillBatching
from backends.frontend.lifecycle import events
from backends.frontend.live_request import LiveRequest
from backends.workers import jobs
from mooncake_store import block_keys
from mooncake_store.client import fetcher
from mooncake_store.client.block_reader import Want
from mooncake_store.client.putter import MARK_S_MAX, Putter
from mooncake_store.client.reserved_slots import LEASE_S, Taken, Use
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.node.control import NodeVerbs
from mooncake_store.prefix_index.prefix_index import PrefixIndex, Segment
from tests.fuzz.defects import (
    a_block_that_another_owner_is_writing_passes_for_stored,
    a_dead_writers_slot_does_not_rest,
    a_leased_block_is_evicted,
    an_event_is_lost,
)

Plant = Callable[[pytest.MonkeyPatch], None]


def a_key_leaves_out_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """The prefix that a key names is off by one: two prompts share the KV of one of them."""
    extend_keys = block_keys.extend_keys

    def planted(key: bytes, token_ids: Any, block_tokens: int) -> list[bytes]:
        tokens = [
            0 if at % block_tokens == block_tokens - 1 else int(token)
            for at, token in enumerate(token_ids)
        ]
        return extend_keys(key, tokens, block_tokens)

    patch.setattr(block_keys, "extend_keys", planted)
    patch.setattr(jobs, "extend_keys", planted)


def a_prefix_counts_one_block_more(patch: pytest.MonkeyPatch) -> None:
    find = PrefixIndex.find

    def planted(self: PrefixIndex, keys: Sequence[bytes]) -> list[Segment]:
        return [(depth + 1, bitmap) for depth, bitmap in find(self, keys)]

    patch.setattr(PrefixIndex, "find", planted)


def a_prompt_begins_one_token_late(patch: pytest.MonkeyPatch) -> None:
    start = PrefillBatching.start

    def planted(self: PrefillBatching, request_id: str, computed_tokens: int) -> None:
        left = self._prompt_tokens[request_id] - computed_tokens
        start(self, request_id, computed_tokens + (computed_tokens > 0 and left > 1))

    patch.setattr(PrefillBatching, "start", planted)


def a_token_is_sent_again_after_a_loss(patch: pytest.MonkeyPatch) -> None:
    decide = LiveRequest._decide

    def planted(self: LiveRequest, action: events.Decide) -> Any:
        if action.attempt > 1 and self._sent_ids:
            self._sent_ids.pop()
        return decide(self, action)

    patch.setattr(LiveRequest, "_decide", planted)


def what_was_read_is_not_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Want, "is_verified", lambda self: True)


def a_pull_takes_what_lies_in_the_slot(patch: pytest.MonkeyPatch) -> None:
    """The header of a block without a checksum is not checked, and neither is the epoch."""

    def planted(*arguments: Any, **named: Any) -> Want:
        return Want(*arguments, **{**named, "key": b""})

    patch.setattr(fetcher, "Want", planted)
    patch.setattr(NodeVerbs, "_refuse_epoch", lambda *_: None)


def a_mark_is_written_after_the_payload(patch: pytest.MonkeyPatch) -> None:
    """Whether the raw slots may be marked is asked before the payload, which may take long."""
    fill, left = Putter._fill, list[tuple[Putter, Any, int, Sequence[Use]]]()

    def mark_taken(self: Putter, info: Any, size_bytes: int, taken: Taken) -> None:
        left.append((self, info, size_bytes, taken.markable()))

    def planted(self: Putter, info: Any, writes: Any, until_s: float) -> list[int]:
        late = [each for each in left if each[:2] == (self, info)]
        left[:] = [each for each in left if each not in late]
        digests = fill(self, info, writes, until_s)
        for _, _, size_bytes, uses in late:
            if uses:
                self._mark(info, size_bytes, uses, LEASE_S, boot_s() + MARK_S_MAX)
        return digests

    patch.setattr(Putter, "_mark_taken", mark_taken)
    patch.setattr(Putter, "_fill", planted)


def a_put_of_a_block_that_another_is_writing_is_true(patch: pytest.MonkeyPatch) -> None:
    put = Putter._put

    def planted(self: Putter, *arguments: Any) -> list[bool | None]:
        return [True if done is None else done for done in put(self, *arguments)]

    patch.setattr(Putter, "_put", planted)


DEFECTS: list[Plant] = [
    a_leased_block_is_evicted,
    a_key_leaves_out_the_last_token,
    an_event_is_lost,
    a_prefix_counts_one_block_more,
    a_prompt_begins_one_token_late,
    a_dead_writers_slot_does_not_rest,
    a_token_is_sent_again_after_a_loss,
    what_was_read_is_not_verified,
    a_pull_takes_what_lies_in_the_slot,
    a_mark_is_written_after_the_payload,
    a_put_of_a_block_that_another_is_writing_is_true,
    a_block_that_another_owner_is_writing_passes_for_stored,
]
