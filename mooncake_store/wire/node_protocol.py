"""The messages of a storage node's control socket, and the client that sends them.

Framing, versions and errors are those of the directory (framing.py, request_reply.py). A slow
request may be answered after later ones. Therefore each concurrent call uses its own connection.

Without a reply in time, a call raises StoreUnavailable, and the request may still be carried out.
If that happens to a `load`, bytes may still arrive in its slots. The caller must let the lease on
the slots expire and must not abandon them.

Not here: the server side (node/control.py), the choice of the blocks (client/).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from mooncake_store.records.blocks import Copy
from mooncake_store.wire.directory_protocol import Count, Key
from mooncake_store.wire.request_reply import Requester, Verb, ZeroMqConnection

BLOCKS_MAX = 4_096  # in one request
DEADLINE_S_MAX = 600.0  # of one request; the client shortens longer deadlines to this
TIMEOUT_S = 2.0  # for verbs that move no bytes
MARGIN_S = 1.0  # seconds after the deadline for the reply to arrive

Deadline = Annotated[float, msgspec.Meta(gt=0.0, le=DEADLINE_S_MAX)]


class Restore(NamedTuple):
    """A block to be read from a slot of the SSD into a slot of the segment."""

    key: Key
    ssd_slot: Count
    ssd_generation: Count
    slot: Count
    generation: Count  # of `slot`
    checksum: Count
    size_bytes: Annotated[int, msgspec.Meta(ge=1)]


class NodeStats(msgspec.Struct, frozen=True):
    """State of one storage node: counters since it started, and current sizes and states."""

    node_id: str
    incarnation: str
    segment_bytes: int
    segment_pages: str  # for operators: kinds of the segment's memory pages, and its folder
    unit_bytes: int
    requests_waiting: int  # at the control socket, to be carried out
    ssd: str = ""  # state of the SSD tier; "" for a node without an SSD
    ssd_bytes: int = 0
    ssd_blocks: int = 0
    spilled_blocks: int = 0
    spilled_bytes: int = 0
    spills_given_up: int = 0  # offered blocks that were not stored, or whose commit was rejected
    restored_blocks: int = 0
    restored_bytes: int = 0
    restores_missed: int = 0  # blocks that `load` requests named and the node did not restore
    checksum_failures: int = 0
    disk_errors: int = 0
    fetched_blocks: int = 0
    index_blocks: int = 0  # in this node's copy of the directory's index; 0 if it maintains none


class Ping(Verb[str], tag="ping", frozen=True):
    pass


class LoadBlocks(Verb[list[bool]], tag="load", frozen=True):
    blocks: Annotated[list[Restore], msgspec.Meta(max_length=BLOCKS_MAX)]
    deadline_s: Deadline
    epoch: Count = 0  # of the directory that granted the slots; 0: not given, so not checked


class Fetch(Verb[list[bool]], tag="fetch", frozen=True):
    """Copy these blocks of other nodes to this node: keys[i] from copies[i]."""

    keys: Annotated[list[Key], msgspec.Meta(max_length=BLOCKS_MAX)]
    copies: Annotated[list[Copy], msgspec.Meta(max_length=BLOCKS_MAX)]
    deadline_s: Deadline
    epoch: Count = 0  # of the directory that leased the copies; 0: not given, so not checked


class AskNodeStats(Verb[NodeStats], tag="node_stats", frozen=True):
    pass


class Leave(Verb[None], tag="leave", frozen=True):
    pass


AnyControl = Ping | LoadBlocks | Fetch | AskNodeStats | Leave


class NodeClient:
    def __init__(self, address: str) -> None:
        self.address = address
        who = f"the storage node at {address.partition('#')[0]}"
        self._requester = Requester(
            who,
            "is it running, and can this host reach the address?",
            lambda context: ZeroMqConnection(context, address, who=who),
        )

    def ping(self, timeout_s: float = TIMEOUT_S) -> str:
        """Returns the incarnation of the node."""
        return self._requester.ask(Ping(), timeout_s)

    def load(self, blocks: Sequence[Restore], deadline_s: float, epoch: int = 0) -> list[bool]:
        """Load these blocks from the SSD into the segment. True: the block is verified, and its
        header is READY. False: the block was not loaded, and no bytes are in flight for it, so its
        slot may be abandoned. The node removes a missing or corrupt SSD copy from the directory.

        After StoreUnavailable or TransferTimeout, bytes may still arrive. After EpochPassed, no
        block was loaded, because the node has registered with another directory. The slots
        are void, even if their headers are "writing": allocate again.
        """
        deadline_s = min(deadline_s, DEADLINE_S_MAX)
        request = LoadBlocks(list(blocks), deadline_s, epoch)
        return self._requester.ask(request, deadline_s + MARGIN_S)

    def fetch(
        self, keys: Sequence[bytes], copies: Sequence[Copy], deadline_s: float, epoch: int = 0
    ) -> list[bool]:
        """Make the node copy these blocks of other nodes. True: the node has the block afterwards.
        The caller must lease the copies until the reply. Raises EpochPassed and copies nothing if
        the node has registered with another directory than that of `epoch`: the leases are void."""
        deadline_s = min(deadline_s, DEADLINE_S_MAX)
        request = Fetch(list(keys), list(copies), deadline_s, epoch)
        return self._requester.ask(request, deadline_s + MARGIN_S)

    def stats(self, timeout_s: float = TIMEOUT_S) -> NodeStats:
        return self._requester.ask(AskNodeStats(), timeout_s)

    def leave(self, timeout_s: float = TIMEOUT_S) -> None:
        """Make the node deregister and exit."""
        self._requester.ask(Leave(), timeout_s)

    def close(self) -> None:
        """A second call has no effect. Calls of other threads in progress raise
        StoreUnavailable."""
        self._requester.close()

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
