"""The messages of a storage node's control socket, and the client that sends them.

Framing, versions and rejections are those of the directory (framing.py, request_reply.py). A reply
may take as long as the disk or the network needs, so replies arrive in any order. The number in the
header assigns a reply to its request, and each call uses a connection of its own.

Without a reply in time the call raises StoreUnavailable, and the request may still be carried out.
For `load` that means that bytes may still arrive in the segment: let the lease on those slots
expire, do not abandon them.

Not here: the answering side (node/control.py), which blocks to request (client/).
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
MARGIN_S = 1.0  # the node keeps the deadline itself; this is the time for its reply to arrive

Deadline = Annotated[float, msgspec.Meta(gt=0.0, le=DEADLINE_S_MAX)]


class Restore(NamedTuple):
    """A block to be read from a slot of the SSD into a slot of the segment."""

    key: Key
    ssd_slot: Count
    ssd_generation: Count
    slot: Count
    generation: Count
    checksum: Count
    size_bytes: Annotated[int, msgspec.Meta(ge=1)]


class NodeStats(msgspec.Struct, frozen=True):
    """Totals of one storage node since it started."""

    node_id: str
    incarnation: str
    segment_bytes: int
    segment_pages: str  # kinds of pages and the folder
    unit_bytes: int
    requests_waiting: int  # on the control socket
    ssd: str = ""  # state of the SSD tier; "" for a node without one
    ssd_bytes: int = 0
    ssd_blocks: int = 0
    spilled_blocks: int = 0
    spilled_bytes: int = 0
    spills_given_up: int = 0  # offered blocks that were not stored on the SSD
    restored_blocks: int = 0
    restored_bytes: int = 0
    restores_missed: int = 0  # missing, unreadable or after the deadline
    checksum_failures: int = 0
    disk_errors: int = 0
    fetched_blocks: int = 0
    index_blocks: int = 0  # in the index replica, if this node writes it


class Ping(Verb[str], tag="ping", frozen=True):
    pass


class LoadBlocks(Verb[list[bool]], tag="load", frozen=True):
    blocks: Annotated[list[Restore], msgspec.Meta(max_length=BLOCKS_MAX)]
    deadline_s: Deadline
    epoch: Count = 0  # of the directory that granted the slots; EpochPassed if another one leads


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
        """The incarnation of the node that answers."""
        return self._requester.ask(Ping(), timeout_s)

    def load(self, blocks: Sequence[Restore], deadline_s: float, epoch: int = 0) -> list[bool]:
        """Load these blocks from the SSD into the segment. True: verified, with a READY
        header.

        False: the block is missing, or was not in time, or is corrupt (the directory has then been
        informed). Slots with False may be abandoned: nothing is in flight. StoreUnavailable or
        TransferTimeout: bytes may still arrive. EpochPassed: no bytes have arrived or will, unless
        the slot was granted in time.
        """
        deadline_s = min(deadline_s, DEADLINE_S_MAX)
        request = LoadBlocks(list(blocks), deadline_s, epoch)
        return self._requester.ask(request, deadline_s + MARGIN_S)

    def fetch(
        self, keys: Sequence[bytes], copies: Sequence[Copy], deadline_s: float, epoch: int = 0
    ) -> list[bool]:
        """Make the node copy these blocks of other nodes; returns which of them it has afterwards.
        The caller leases the copies for that time. EpochPassed: the directory of `epoch`, which
        leased them, is no longer the leader, and nothing was copied."""
        deadline_s = min(deadline_s, DEADLINE_S_MAX)
        request = Fetch(list(keys), list(copies), deadline_s, epoch)
        return self._requester.ask(request, deadline_s + MARGIN_S)

    def stats(self, timeout_s: float = TIMEOUT_S) -> NodeStats:
        return self._requester.ask(AskNodeStats(), timeout_s)

    def leave(self, timeout_s: float = TIMEOUT_S) -> None:
        """Make the node deregister and exit."""
        self._requester.ask(Leave(), timeout_s)

    def close(self) -> None:
        """A call in progress in another thread raises StoreUnavailable. A second close has no
        effect."""
        self._requester.close()

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
