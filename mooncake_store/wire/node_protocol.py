"""What clients ask of a storage node: the messages of its control socket.

Framed, versioned and refused exactly like those of the directory (framing.py, request_reply.py). A
reply may take as long as the disk or the network needs, so requests are answered in any order; the
number in the header says which one.

Not here: sockets (node_control.py, node_client.py), what a verb does (node_verbs.py).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from mooncake_store.records.blocks import Copy
from mooncake_store.wire.directory_protocol import Count, Key
from mooncake_store.wire.request_reply import Verb

BLOCKS_MAX = 4_096  # in one request
DEADLINE_S_MAX = 600.0

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


class Ping(Verb, tag="ping", frozen=True):
    pass


class LoadBlocks(Verb, tag="load", frozen=True):
    blocks: Annotated[list[Restore], msgspec.Meta(max_length=BLOCKS_MAX)]
    deadline_s: Deadline


class Fetch(Verb, tag="fetch", frozen=True):
    """Copy these blocks of other nodes here: keys[i] from copies[i]."""

    keys: Annotated[list[Key], msgspec.Meta(max_length=BLOCKS_MAX)]
    copies: Annotated[list[Copy], msgspec.Meta(max_length=BLOCKS_MAX)]
    deadline_s: Deadline


class AskNodeStats(Verb, tag="node_stats", frozen=True):
    pass


class Leave(Verb, tag="leave", frozen=True):
    pass


AnyControl = Ping | LoadBlocks | Fetch | AskNodeStats | Leave


class NodeStats(msgspec.Struct, frozen=True):
    """What one storage node has done since it started. Bytes and blocks count up."""

    node_id: str
    incarnation: str
    segment_bytes: int
    segment_pages: str  # what pages the segment has, and where it is
    unit_bytes: int
    requests_waiting: int  # on the control socket
    ssd: str = ""  # state of the SSD tier; "" when the node has none
    ssd_bytes: int = 0
    ssd_blocks: int = 0
    spilled_blocks: int = 0
    spilled_bytes: int = 0
    spills_given_up: int = 0  # evicted while they were written, or not written at all
    restored_blocks: int = 0
    restored_bytes: int = 0
    restores_missed: int = 0  # not there any more, too late, or not readable
    checksum_failures: int = 0
    disk_errors: int = 0
    fetched_blocks: int = 0
