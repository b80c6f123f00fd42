"""The client's side of test_frozen_node.py, in a process whose UCX speaks TCP only.

stdin: one line with the target's NodeInfo, then a line whenever the test has done its part.
stdout: one word whenever this side has done its own. A failed assertion ends it with a traceback.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time

import numpy as np

from mooncake_store.client.store import Store
from mooncake_store.errors import TransferTimeout
from mooncake_store.layout import KvLayout, geometry
from mooncake_store.memory.digests import checksum_of
from mooncake_store.memory.segment import Segment, host_id
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.nixl_transport import NixlTransport
from mooncake_store.transports.transport import ByteSpan
from tests.mooncake_store.in_process import InProcessDirectory

SIZE = 1024**2
LAYOUT = KvLayout(layers=4, kv_heads=4, head_dim=64, dtype="float32", block_tokens=64)
PATIENCE_S = 20.0


def tell(word: str) -> str:
    """Report, wait for the other side, and return what it says."""
    print(word, flush=True)
    return sys.stdin.readline().strip()


def use_transport(node: NodeInfo) -> None:
    """Time out, watch the orphan until it resolves, go on with the same node."""
    buffer = np.zeros(2 * SIZE, np.uint8)
    transport = NixlTransport()
    transport.register(buffer)
    transport.read(node, [ByteSpan(0, SIZE)], [(buffer, ByteSpan(0, SIZE))], 10.0)
    tell("connected")
    started_s = time.monotonic()
    try:
        transport.read(node, [ByteSpan(0, SIZE)], [(buffer, ByteSpan(SIZE, SIZE))], 0.3)
        raise AssertionError("a frozen node answered")
    except TransferTimeout:
        assert 0.29 < time.monotonic() - started_s < 3.0
    [(pending, span)] = transport.pending_targets()
    assert pending is buffer and span == ByteSpan(SIZE, SIZE), span
    assert transport.counters.timeouts == 1
    fate = tell("timed-out")
    until_s = time.monotonic() + PATIENCE_S
    while transport.pending_targets():
        assert time.monotonic() < until_s, "the orphan never ended"
    if fate == "thaws":
        assert np.array_equal(buffer[:SIZE], buffer[SIZE:]), "it ended without its bytes"
        transport.read(node, [ByteSpan(SIZE, SIZE)], [(buffer, ByteSpan(0, SIZE))], 10.0)
        assert transport.counters.reads == 2
    transport.close()


def use_store(node: NodeInfo) -> None:
    """A read and a fetch that time out are misses; pages and slots stay reserved meanwhile."""
    block, directory = LAYOUT.block_bytes, InProcessDirectory()
    path = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
    with Segment.create(path, 4 * SIZE) as own, Segment.open(node.segment_path) as remote:
        directory.register_node(node)
        directory.register_node(
            NodeInfo("own", "1", host_id(path), path, own.size_bytes, "", b"", own.address)
        )
        store = Store(directory, "own", "f" * 32, LAYOUT)  # type: ignore[arg-type]
        pool = np.zeros(8 * block, np.uint8)
        store.register_buffer(pool)
        directory.attach(node.node_id, "f" * 32, block)
        keys = [bytes([number]) * 16 for number in range(4)]
        given = directory.allocate(node.node_id, keys, "writer", 60.0)
        shape = geometry(node.segment_bytes, node.unit_bytes)
        rows = []
        for key, (_, slot, generation, *_) in zip(keys, given.slots, strict=True):
            start = shape.slot_offset_bytes(slot)
            rows.append(
                (
                    key,
                    slot,
                    generation,
                    checksum_of(remote.view[start : start + block], LAYOUT.layers),
                )
            )
        assert all(directory.commit(node.node_id, rows, "writer", 60.0))
        copies = [places[0] for places in store.lookup(keys, "reader", 60.0)]
        assert store.read(copies[:1], pool, [0], 10.0) == [True]
        tell("connected")
        assert store.read(copies[:1], pool, [3 * block], 0.3) == [False]
        assert store.pending_offsets() == [ByteSpan(3 * block, block)]
        assert store.read(copies[:1], pool, [0], 10.0) == [False], "left alone for a moment"
        store._nodes._bad.clear()  # that moment passes
        assert store.fetch(keys, copies, "reader", 60.0, 0.3).blocks == 0
        writing = [n.writing_blocks for n in directory.stats().nodes if n.node_id == "own"]
        assert writing == [4], "a slot that may still be written was given up"
        assert store.pending_offsets() == [ByteSpan(3 * block, block)]
        fate = tell("timed-out")
        until_s = time.monotonic() + PATIENCE_S
        while store.pending_offsets():
            assert time.monotonic() < until_s, "the orphan never ended"
        if fate == "thaws":
            assert np.array_equal(pool[:block], pool[3 * block : 4 * block])
        assert store.counters()["nixl"].timeouts == 2
        store.close()


def main() -> None:
    values = json.loads(sys.stdin.readline())
    values["agent_metadata"] = bytes.fromhex(values["agent_metadata"])
    {"transport": use_transport, "store": use_store}[sys.argv[1]](NodeInfo(**values))
    print("resolved", flush=True)


if __name__ == "__main__":
    main()
