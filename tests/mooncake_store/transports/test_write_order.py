"""Where a transport says that it keeps the order of spans, no later one is there before an earlier.

A put relies on it: payloads and the headers that vouch for them are one write then. A get that
verifies nothing does too: headers are read behind the payloads, in one read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_store.memory.segment import Segment
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.nixl_agent import AgentDevices, NixlUnavailable
from mooncake_store.transports.nixl_transport import NixlTransport
from mooncake_store.transports.tcp_transport import TcpTransport
from mooncake_store.transports.transport import ByteSpan, LocalSpan, Transport
from tests.mooncake_store.targets import TARGET_BYTES, Target, TargetPool

BLOCK_BYTES, BLOCKS = 256 * 1024, 12
PAYLOADS = [ByteSpan(65_536 + i * BLOCK_BYTES, BLOCK_BYTES) for i in range(BLOCKS)]
HEADERS = [ByteSpan(i * 64, 64) for i in range(BLOCKS)]
DEADLINE_S = 10.0
assert sum(PAYLOADS[-1]) <= TARGET_BYTES


class Watcher:
    """Looks, as fast as it can, for a header whose payload is not there yet."""

    def __init__(self, view: np.ndarray) -> None:
        self._headers = [view[span.offset_bytes :][:8].view(np.uint64) for span in HEADERS]
        self._ends = [view[sum(span) - 8 : sum(span)].view(np.uint64) for span in PAYLOADS]
        self.looks = self.too_early = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            for header, end in zip(self._headers, self._ends, strict=True):
                said = int(header[0])
                self.too_early += int(end[0]) < said
                self.looks += 1

    def close(self) -> None:
        self._is_over = True
        self._thread.join()


class Rewriter:
    """Marks a header, then changes its payload, as fast as it can: a payload is never ahead."""

    def __init__(self, view: np.ndarray) -> None:
        self._headers = [view[span.offset_bytes :][:8].view(np.uint64) for span in HEADERS]
        self._ends = [view[sum(span) - 8 : sum(span)].view(np.uint64) for span in PAYLOADS]
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._is_over:
            number += 1
            for header, end in zip(self._headers, self._ends, strict=True):
                header[0] = number
                end[0] = number

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        del self._headers, self._ends


@pytest.fixture
def target(targets: TargetPool) -> Iterator[Target]:
    taken = targets.take("t0")
    yield taken
    targets.give_back(taken)


@pytest.fixture
def nixl(request: pytest.FixtureRequest) -> Iterator[NixlTransport]:
    try:
        made = NixlTransport(request.param)
    except NixlUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()


def write_rounds(transport: Transport, target: Target, rounds: int, is_reversed: bool) -> Watcher:
    buffer = np.zeros(BLOCKS * (BLOCK_BYTES + 64), np.uint8)
    transport.register(buffer)
    payloads = [ByteSpan(i * BLOCK_BYTES, BLOCK_BYTES) for i in range(BLOCKS)]
    headers = [ByteSpan(BLOCKS * BLOCK_BYTES + i * 64, 64) for i in range(BLOCKS)]
    sources: list[LocalSpan] = [(buffer, span) for span in [*payloads, *headers]]
    targets = [*PAYLOADS, *HEADERS]
    if is_reversed:
        sources, targets = sources[::-1], targets[::-1]
    with Segment.open(target.path) as segment:
        watcher = Watcher(segment.view)
        try:
            for number in range(1, rounds + 1):
                for payload, header in zip(payloads, headers, strict=True):
                    buffer[sum(payload) - 8 : sum(payload)].view(np.uint64)[0] = number
                    buffer[header.offset_bytes :][:8].view(np.uint64)[0] = number
                transport.write(target.info, sources, targets, DEADLINE_S)
        finally:
            watcher.close()
        del watcher._headers, watcher._ends
    return watcher


def read_rounds(
    transport: Transport, target: Target, rounds: int, is_reversed: bool
) -> tuple[int, int]:
    """How often a payload was newer than its header, and the last number that was seen."""
    buffer = np.zeros(BLOCKS * (BLOCK_BYTES + 64), np.uint8)
    transport.register(buffer)
    payloads = [ByteSpan(i * BLOCK_BYTES, BLOCK_BYTES) for i in range(BLOCKS)]
    headers = [ByteSpan(BLOCKS * BLOCK_BYTES + i * 64, 64) for i in range(BLOCKS)]
    targets: list[LocalSpan] = [(buffer, span) for span in [*payloads, *headers]]
    sources = [*PAYLOADS, *HEADERS]
    if is_reversed:
        sources, targets = sources[::-1], targets[::-1]
    ahead = seen = 0
    with Segment.open(target.path) as segment:
        rewriter = Rewriter(segment.view)
        try:
            for _ in range(rounds):
                transport.read(target.info, sources, targets, DEADLINE_S)
                for payload, header in zip(payloads, headers, strict=True):
                    of_payload = int(buffer[sum(payload) - 8 : sum(payload)].view(np.uint64)[0])
                    of_header = int(buffer[header.offset_bytes :][:8].view(np.uint64)[0])
                    ahead += of_payload > of_header
                    seen = of_header
        finally:
            rewriter.close()
    return ahead, seen


@pytest.mark.parametrize("nixl", [AgentDevices()], indirect=True)
def test_a_read_by_the_kernel_keeps_the_order_of_its_spans(
    nixl: NixlTransport, target: Target
) -> None:
    ahead, seen = read_rounds(nixl, target, 300, is_reversed=False)
    if not nixl.keeps_order(target.info):
        pytest.skip("no copies by the kernel between processes here")
    assert seen > 1_000 and ahead == 0
    ahead, _ = read_rounds(nixl, target, 300, is_reversed=True)
    assert ahead > 0, "the rewriter would not have shown it"


@pytest.mark.parametrize("nixl", [AgentDevices()], indirect=True)
def test_a_copy_by_the_kernel_keeps_the_order_of_its_spans(
    nixl: NixlTransport, target: Target
) -> None:
    assert not nixl.keeps_order(target.info), "nothing was written, so nobody can know"
    right = write_rounds(nixl, target, 300, is_reversed=False)
    if not nixl.keeps_order(target.info):
        pytest.skip("no copies by the kernel between processes here")
    assert right.looks > 1_000 and right.too_early == 0
    wrong = write_rounds(nixl, target, 300, is_reversed=True)
    assert wrong.too_early > 0, "the watcher would not have seen it"


@pytest.mark.parametrize("nixl", [AgentDevices("lo", is_tcp_only=True)], indirect=True)
def test_over_tcp_nothing_is_promised(nixl: NixlTransport, target: Target) -> None:
    write_rounds(nixl, target, 3, is_reversed=False)
    assert not nixl.keeps_order(target.info)


@pytest.mark.parametrize("made", [TcpTransport, MappedTransport])
def test_other_transports_promise_nothing(made: type[Transport], target: Target) -> None:
    transport = made()
    assert not transport.keeps_order(target.info)
    transport.close()
