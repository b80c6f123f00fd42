"""A storage node's control socket as clients see it: one method per verb, synchronous, any thread.

Each call has a connection of its own while it lasts, so a slow load does not hold up a ping. When
no answer came in time the call raises StoreUnavailable; what the node was asked may still happen.
For `load` that means bytes may still arrive in the segment: let the lease on those slots run out,
do not abandon them.

Not here: which blocks to ask for (store.py), the messages (mooncake_store/wire/node_protocol.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncake_store.records.blocks import Copy
from mooncake_store.wire import node_protocol as control
from mooncake_store.wire.node_protocol import NodeStats, Restore
from mooncake_store.wire.request_reply import Requester, ZeroMqConnection

Decoder = msgspec.msgpack.Decoder

TIMEOUT_S = 2.0  # for verbs that move no bytes
MARGIN_S = 1.0  # the node keeps its deadline by itself; this long its answer may take to get here

_NONE = Decoder(type(None))
_TEXT = Decoder(str)
_BOOLS = Decoder(list[bool])
_STATS = Decoder(NodeStats)


class NodeClient:
    """The verbs of one storage node. Thread-safe."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._requester = Requester(
            f"the storage node at {address}",
            "is it running, and can this host reach the address?",
            lambda context: ZeroMqConnection(context, address),
        )

    def ping(self, timeout_s: float = TIMEOUT_S) -> str:
        """The incarnation of the node that answers."""
        return self._requester.ask(control.Ping(), _TEXT, timeout_s)

    def load(self, blocks: Sequence[Restore], deadline_s: float) -> list[bool]:
        """Read these from the SSD into the segment. True: whole, verified, its header is READY.

        False: it is not there, or not whole (then the directory knows already), or not in time.
        Slots with False may be abandoned: nothing is in flight. StoreUnavailable, TransferTimeout:
        bytes may still arrive.
        """
        request = control.LoadBlocks(list(blocks), deadline_s)
        return self._requester.ask(request, _BOOLS, deadline_s + MARGIN_S)

    def fetch(self, keys: Sequence[bytes], copies: Sequence[Copy], deadline_s: float) -> list[bool]:
        """Have the node copy these blocks of other nodes; which of them it has afterwards.

        The caller leases the copies meanwhile.
        """
        request = control.Fetch(list(keys), list(copies), deadline_s)
        return self._requester.ask(request, _BOOLS, deadline_s + MARGIN_S)

    def stats(self, timeout_s: float = TIMEOUT_S) -> NodeStats:
        return self._requester.ask(control.AskNodeStats(), _STATS, timeout_s)

    def leave(self, timeout_s: float = TIMEOUT_S) -> None:
        """The node deregisters and ends."""
        self._requester.ask(control.Leave(), _NONE, timeout_s)

    def close(self) -> None:
        """Twice is harmless. A call under way in another thread ends with StoreUnavailable."""
        self._requester.close()

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
