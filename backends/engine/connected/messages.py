"""Messages between a worker and the connector inside the engine's processes.

A worker *stages* a prompt before it submits it. The KV that was found for the prompt lies in leased
slots of the worker's storage node, or in pages of the staging pool. `Stage` describes it to the
connector, and after `Staged` the worker submits the prompt.

Not here: sockets and deadlines (channel.py), places (block_pages.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backends.engine.connected.block_pages import SlotUse
from mooncake_store.block_keys import (
    TOKEN_BYTES,
    Tokens,
    block_keys,
    packed_tokens,
    unpacked_tokens,
)

# Holds the Site. MPI passes only TRTLLM* and TLLM* to the processes that TensorRT-LLM starts.
ENVIRONMENT = "TLLM_MOONCAKE_CONNECTOR"


class Site(msgspec.Struct, frozen=True):
    """Address of the worker, and sizes that worker and connector must agree on."""

    channel: str  # ipc address of the worker's inbox; the connectors' inboxes add a suffix to it
    pool_path: str  # file of the staging pool, which worker and connectors map
    block_tokens: int
    block_bytes: int  # of a store block, and of a page of the pool
    aside_bytes_min: int = 0  # loads of at least this size per rank run beside passes; 0: none
    is_alike: bool = False  # all ranks have the same pages, and a block has them once (MLA)

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, environment: dict[str, str]) -> Site:
        text = environment.get(ENVIRONMENT)
        if text is None:
            raise RuntimeError(
                f"{ENVIRONMENT} is not set. A worker sets it when it starts its engine; without a "
                "worker this connector has no KV store to connect to"
            )
        return msgspec.json.decode(text, type=cls)


# -- from the worker


class Stage(msgspec.Struct, tag="stage", frozen=True):
    """The worker will submit this prompt. KV of its first `loaded_tokens` tokens is on this host.

    The engine loads whole pages of these tokens. Computed pages are saved, generated tokens
    included, as far as there are places.
    """

    request_id: str
    token_ids: bytes  # of the prompt as submitted, little-endian uint32
    cache_salt: str
    chain_seed: bytes
    keys: list[bytes]  # of the whole blocks
    places: list[int]  # places[i] is that of block i (block_pages.py)
    loaded_tokens: int
    uses: tuple[SlotUse, ...] = ()  # one for each place that is in a slot
    # Later tokens are not saved, because a complete slot must not be written. 0: no limit.
    saved_tokens_max: int = 0
    is_decode: bool = False  # the last token was generated

    @property
    def token_count(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    @classmethod
    def of(
        cls,
        request_id: str,
        token_ids: Tokens,
        block_tokens: int,
        chain_seed: bytes,
        cache_salt: str,
        places: Sequence[int],
        loaded_tokens: int,
    ) -> Stage:
        packed = bytes(packed_tokens(token_ids))
        keys = block_keys(unpacked_tokens(packed), block_tokens, chain_seed)
        return cls(request_id, packed, cache_salt, chain_seed, keys, list(places), loaded_tokens)


class Unstage(msgspec.Struct, tag="unstage", frozen=True):
    """Forget this stage, and start no further copy from or to its places."""

    request_id: str


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """To each rank: report when the `moves` ordered copies of this request are finished."""

    request_id: str
    moves: int


class MapSegment(msgspec.Struct, tag="map-segment", frozen=True):
    """To each rank: map this segment as a region and lock its pages."""

    region: int
    path: str
    size_bytes: int


class UnmapSegment(msgspec.Struct, tag="unmap-segment", frozen=True):
    """To each rank: unmap this region. No staged prompt has a place in it."""

    region: int


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """The worker exits. An engine does not notify connectors when it shuts down."""


# -- from the connector's scheduler, on rank 0


class Staged(msgspec.Struct, tag="staged", frozen=True):
    request_id: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The connector cannot use this stage, and has dropped it."""

    request_id: str
    reason: str


class Claimed(msgspec.Struct, tag="claimed", frozen=True):
    """The engine has begun this request."""

    request_id: str
    local_tokens: int  # found in the engine's own prefix cache
    loaded_tokens: int  # the tokens after these that are loaded from the stage's places


class Unstaged(msgspec.Struct, tag="unstaged", frozen=True):
    """The scheduler orders no further copy for this stage."""

    request_id: str
    moves: int  # ordered over the life of the stage


# -- from the connector's worker on every rank


class Ready(msgspec.Struct, tag="ready", frozen=True):
    rank: int
    tp_size: int
    rank_bytes: int  # what this rank copies of a store block
    tokens_per_block: int  # of the engine's page
    pool_pages: int
    gpu_pages: int  # pages of the engine, for all requests


class SegmentMapped(msgspec.Struct, tag="segment-mapped", frozen=True):
    rank: int
    region: int
    problem: str = ""  # why this rank could not map it


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The claimed KV is in the engine's pages, and is what the worker has verified."""

    request_id: str
    rank: int


class Saved(msgspec.Struct, tag="saved", frozen=True):
    """KV of the first `tokens` tokens is in the places, loaded or saved. `tokens` only grows."""

    request_id: str
    rank: int
    tokens: int  # in whole pages of the engine


class Drained(msgspec.Struct, tag="drained", frozen=True):
    request_id: str
    rank: int


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """The connector cannot work, so the worker must end the engine."""

    reason: str


ToConnector = Stage | Unstage | Drain | MapSegment | UnmapSegment | Goodbye
FromScheduler = Staged | Refused | Claimed | Unstaged
ToWorker = FromScheduler | Ready | SegmentMapped | Loaded | Saved | Drained | Broken
