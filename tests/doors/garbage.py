"""Frames that no release of ours has sent: random bytes, and messages of ours with damage.

A seed repeats all of it.
"""

from __future__ import annotations

import random
import struct

import msgspec

from mooncake_store.transports import tcp_frames as frames
from mooncake_store.wire import directory_protocol as directory
from mooncake_store.wire import node_protocol as node
from mooncake_store.wire.framing import MessageKind, pack_header
from mooncake_store.wire.mailbox import sealed
from mooncake_store.wire.request_reply import Verb

KEY = bytes(range(16))
# Nothing that would rightly change something if the damage misses it (a node that leaves, say).
DIRECTORY_VERBS: list[Verb] = [
    directory.Nodes(),
    directory.Workers(),
    directory.Stats(),
    directory.TakeSnapshot(),
    directory.Lookup([KEY], "fuzz", 0.0, True),
    directory.Exist(KEY),
    directory.Remove([KEY]),
    directory.Renew("fuzz", 1.0),
    directory.Release("fuzz"),
    directory.NodeReport("n9", "x"),
    directory.Allocate("n9", [KEY], "fuzz", 1.0, False),
    directory.DropCopy(KEY, "n9", 3),
    directory.Commit("n9", [(KEY, 1, 2, 3)], "fuzz", 1.0),
    directory.BlocksOn("n9", 10, False),
    directory.TakeSpills("n9", "fuzz", 4, 1.0),
    directory.PlaceKeys([KEY]),
]
NODE_VERBS: list[Verb] = [
    node.Ping(),
    node.AskNodeStats(),
    node.LoadBlocks([], 0.01),
    node.Fetch([KEY], [], 0.01),
]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # of HTTP/2, which Triton speaks
ZMTP = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00"


class Garbage:
    """Chance decides, by its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def some_bytes(self, most: int = 300) -> bytes:
        return self.rng.randbytes(self.rng.choice([0, 1, 16, self.rng.randrange(most)]))

    def damaged(self, raw: bytes) -> bytes:
        """Bits turned over, cut, made longer, or left as it is."""
        changed = bytearray(raw)
        for _ in range(self.rng.choice([0, 1, 1, 3])):
            if changed:
                changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        if self.rng.random() < 0.2:
            del changed[self.rng.randrange(len(changed) + 1) :]
        if self.rng.random() < 0.2:
            changed += self.some_bytes()
        return bytes(changed)

    def request(self, verbs: list[Verb]) -> list[bytes]:
        """The frames of a request to the directory or a node."""
        if self.rng.random() < 0.3:
            return [self.some_bytes() for _ in range(self.rng.randint(1, 5))]
        kind, version = MessageKind.REQUEST, self.rng.choice([3, 3, 3, 2, 4, 65_535])
        header = pack_header(kind, self.rng.randrange(2**64), version)
        body = self.damaged(msgspec.msgpack.encode(self.rng.choice(verbs)))
        found = [self.damaged(header) if self.rng.random() < 0.3 else header, body]
        return found * self.rng.choice([1, 1, 1, 2])

    def message(self) -> bytes:
        """To an inbox."""
        raw = sealed(msgspec.msgpack.encode("hello"), "")
        return self.damaged(raw) if self.rng.random() < 0.7 else self.some_bytes()

    def transport_frame(self, token: bytes) -> bytes:
        """To a node's data port, behind TLS: with or without the right token first."""
        hello = frames.pack(frames.FrameKind.HELLO, len(token)) + token
        begin = hello if self.rng.random() < 0.5 else self.damaged(hello)
        spans = [(self.rng.randrange(2**63), self.rng.randrange(2**33)) for _ in range(3)]
        kind = self.rng.choice([frames.FrameKind.READ, frames.FrameKind.WRITE])
        asked = frames.pack(kind, self.rng.choice([3, 2**40])) + frames.pack_spans(spans)
        return begin + (self.damaged(asked) if self.rng.random() < 0.7 else self.some_bytes())

    def opening(self) -> bytes:
        """What somebody without keys may begin a connection with."""
        rng = self.rng
        hello = b"\x16\x03\x01" + struct.pack(">H", rng.randrange(600)) + rng.randbytes(200)
        plain = frames.pack(frames.FrameKind.HELLO, 4) + b"abcd"
        frame = struct.pack(">I", rng.randrange(2**20))[1:] + rng.randbytes(6)
        return self.damaged(
            rng.choice([ZMTP + rng.randbytes(60), hello, plain, PREFACE + frame, rng.randbytes(99)])
        )
