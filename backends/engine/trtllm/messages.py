"""What a worker and the connector inside TensorRT-LLM's processes say to each other.

A worker brings ("stages") the KV that it found for a prompt to this host: it lies in slots of its
storage node, which are leased, or in pages of the staging pool. It says so with `Stage`, and
submits the prompt only after `Staged`. The connector answers TensorRT-LLM from what is staged,
never from the network: a load cannot fail any more once it was promised.

Not here: sockets and deadlines (channel.py), the meaning of places (block_pages.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backends.engine.trtllm.block_pages import SlotUse
from mooncake_store.block_keys import (
    TOKEN_BYTES,
    Tokens,
    block_keys,
    packed_tokens,
    unpacked_tokens,
)

ENVIRONMENT = "TLLM_MOONCAKE_CONNECTOR"  # only TRTLLM* and TLLM* reach processes started by MPI


class Site(msgspec.Struct, frozen=True):
    """Where a connector finds its worker, and the sizes that both must agree on."""

    channel: str  # the worker's end: ipc://...; connectors bind inboxes whose names start with it
    pool_path: str  # the staging pool: a file that worker and connectors map
    block_tokens: int
    block_bytes: int  # of a store block; a page of the pool
    aside_bytes_min: int = 0  # loads of so many bytes a rank hold up no pass; 0: none do
    is_alike: bool = False  # all ranks have the same pages, and a block has them once (MLA)

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, environment: dict[str, str]) -> Site:
        text = environment.get(ENVIRONMENT)
        if text is None:
            raise RuntimeError(
                f"{ENVIRONMENT} is not set: this connector is started by a worker of engine "
                "tensorrt_llm, which sets it; without one there is no KV store to connect to"
            )
        return msgspec.json.decode(text, type=cls)


# -- from the worker


class Stage(msgspec.Struct, tag="stage", frozen=True):
    """This prompt will be submitted; its leading tokens are on this host, more may be saved.

    places[i] is where block i lies (block_pages.py). The first `loaded_tokens` are there to be
    loaded; of them only whole pages of TensorRT-LLM count. What is computed beyond goes to its
    places, of generated tokens too as far as there are places.
    """

    request_id: str
    token_ids: bytes  # of the prompt as submitted, little-endian uint32
    cache_salt: str
    chain_seed: bytes
    keys: list[bytes]  # of the whole blocks
    places: list[int]
    loaded_tokens: int
    uses: tuple[SlotUse, ...] = ()  # of the slots that are among the places, one each
    # Nothing behind so many tokens is saved: a slot that is complete must not be written any more.
    # 0: as far as there are places.
    saved_tokens_max: int = 0

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
    """Forget this stage; start no further copy from or to its places."""

    request_id: str


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """To each rank: say when the `moves` copies that were ordered for this request are over."""

    request_id: str
    moves: int


class MapSegment(msgspec.Struct, tag="map-segment", frozen=True):
    """To each rank: map this segment and lock its pages; places in that region will come."""

    region: int
    path: str
    size_bytes: int


class UnmapSegment(msgspec.Struct, tag="unmap-segment", frozen=True):
    """To each rank: let go of it. Nothing that is staged has a place there."""

    region: int


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """The worker ends: TensorRT-LLM does not tell connectors that it is shut down."""


# -- from the connector's scheduler, on rank 0


class Staged(msgspec.Struct, tag="staged", frozen=True):
    request_id: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """This stage cannot be used, and was not kept."""

    request_id: str
    reason: str


class Claimed(msgspec.Struct, tag="claimed", frozen=True):
    """TensorRT-LLM took the request: what it need not compute."""

    request_id: str
    local_tokens: int  # that its own pages still had
    loaded_tokens: int  # beyond those, from the stage's places


class Unstaged(msgspec.Struct, tag="unstaged", frozen=True):
    """No copy will be ordered any more; so many were, over the life of this stage."""

    request_id: str
    moves: int


# -- from the connector's worker on every rank


class Ready(msgspec.Struct, tag="ready", frozen=True):
    rank: int
    tp_size: int
    rank_bytes: int  # what this rank copies of a store block
    tokens_per_block: int  # TensorRT-LLM's page
    pool_pages: int
    gpu_pages: int  # of TensorRT-LLM, for all requests


class SegmentMapped(msgspec.Struct, tag="segment-mapped", frozen=True):
    rank: int
    region: int
    problem: str = ""  # why it is not


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """What was to be loaded is in the engine's pages, and it was what the worker has verified."""

    request_id: str
    rank: int


class Saved(msgspec.Struct, tag="saved", frozen=True):
    """The KV of the first `tokens` tokens is in the places, loaded or saved; it only grows."""

    request_id: str
    rank: int
    tokens: int  # whole pages of TensorRT-LLM


class Drained(msgspec.Struct, tag="drained", frozen=True):
    request_id: str
    rank: int


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """Nothing can work: sizes differ, the pool cannot be mapped. The worker must not start."""

    reason: str


ToConnector = Stage | Unstage | Drain | MapSegment | UnmapSegment | Goodbye
ToWorker = (
    Staged
    | Refused
    | Claimed
    | Unstaged
    | Ready
    | SegmentMapped
    | Loaded
    | Saved
    | Drained
    | Broken
)
