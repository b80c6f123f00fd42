"""The contract of a transport, against each of them and a real second process.

What it promises stands in mooncake_store/transports/transport.py.

Not here: frozen nodes (test_frozen_node.py), what only plain TCP has (test_tcp_transport.py).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.memory.segment import Segment
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.nixl_agent import NixlUnavailable
from mooncake_store.transports.tcp_transport import TcpTransport
from mooncake_store.transports.transport import ByteSpan, Transport
from tests.mooncake_store.targets import TARGET_BYTES, Target, TargetPool

SEGMENT_BYTES = TARGET_BYTES
BUFFER_BYTES = 2 * 1024**2
DEADLINE_S = 10.0


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made: Transport
    if request.param == "mapped":
        made = MappedTransport()
    elif request.param == "tcp":
        made = TcpTransport()
    else:
        try:
            from mooncake_store.transports.nixl_transport import NixlTransport

            made = NixlTransport()
        except NixlUnavailable as error:
            pytest.skip(str(error))
    yield made
    made.close()


each = pytest.mark.parametrize("transport", ["mapped", "nixl", "tcp"], indirect=True)


@pytest.fixture
def start(targets: TargetPool) -> Iterator[Callable[..., Target]]:
    """Starts target processes, or takes ones that other tests are done with."""
    started: list[tuple[Target, bool]] = []

    def start_one(node_id: str = "t0", environment: dict[str, str] | None = None) -> Target:
        target = targets.take(node_id, environment)
        started.append((target, environment is None))
        return target

    yield start_one
    for target, is_reusable in started:
        targets.give_back(target, is_reusable)


def random_bytes(size_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def disjoint_spans(chance: random.Random, size_bytes: int, spans: int) -> list[ByteSpan]:
    """Spans in random order that do not touch each other, some of them empty."""
    cuts = sorted(chance.sample(range(size_bytes), 2 * spans))
    found = [
        ByteSpan(start, chance.choice([0, 1, end - start, end - start]))
        for start, end in zip(cuts[::2], cuts[1::2], strict=True)
    ]
    chance.shuffle(found)
    return found


def fit(spans: list[ByteSpan], lengths: list[int]) -> list[ByteSpan]:
    return [
        ByteSpan(span.offset_bytes, min(span.length_bytes, length))
        for span, length in zip(spans, lengths, strict=True)
    ]


@each
def test_random_spans_arrive_and_untouched_bytes_stay(
    transport: Transport, start: Callable[..., Target], seed: int
) -> None:
    target, chance = start(), random.Random(seed)
    buffer = random_bytes(BUFFER_BYTES, seed)
    other = random_bytes(BUFFER_BYTES, seed + 1)
    transport.register(buffer)
    transport.register(other)
    moved = [0, 0]
    with Segment.open(target.path) as segment:
        segment.view[:] = random_bytes(SEGMENT_BYTES, seed + 2)
        for _ in range(40):
            spans = chance.randint(1, 40)
            remote = disjoint_spans(chance, SEGMENT_BYTES, spans)
            local = disjoint_spans(chance, BUFFER_BYTES, spans)
            remote = fit(remote, [span.length_bytes for span in local])
            local = fit(local, [span.length_bytes for span in remote])
            mixed = chance.random() < 0.3  # of two buffers in one batch
            buffers = [chance.choice([buffer, other]) if mixed else buffer for _ in local]
            is_read = chance.random() < 0.5
            wanted = [segment.view.copy(), buffer.copy(), other.copy()]
            for there, here, mine in zip(remote, local, buffers, strict=True):
                near = wanted[1 if mine is buffer else 2]
                far_part = slice(there.offset_bytes, there.offset_bytes + there.length_bytes)
                near_part = slice(here.offset_bytes, here.offset_bytes + here.length_bytes)
                if is_read:
                    near[near_part] = wanted[0][far_part]
                else:
                    wanted[0][far_part] = near[near_part]
            locals_ = list(zip(buffers, local, strict=True))
            if is_read:
                transport.read(target.info, remote, locals_, DEADLINE_S)
            else:
                transport.write(target.info, locals_, remote, DEADLINE_S)
            moved[0 if is_read else 1] += sum(span.length_bytes for span in remote)
            for is_now, should_be in zip([segment.view, buffer, other], wanted, strict=True):
                assert np.array_equal(is_now, should_be)
    counters = transport.counters
    assert (counters.read_bytes, counters.write_bytes) == tuple(moved)
    assert counters.reads + counters.writes == 40
    assert (counters.failures, counters.timeouts) == (0, 0)


@each
@pytest.mark.parametrize("phase", [0, 192])
def test_equal_spans_on_a_grid_arrive_in_the_given_order(
    transport: Transport, start: Callable[..., Target], seed: int, phase: int
) -> None:
    target, chance, length = start(), random.Random(seed), 8192
    buffer = np.zeros(BUFFER_BYTES, np.uint8)
    transport.register(buffer)
    with Segment.open(target.path) as segment:
        segment.view[:] = random_bytes(SEGMENT_BYTES, seed)
        for _ in range(5):
            slots = chance.sample(range(SEGMENT_BYTES // length - 1), 50)
            pages = chance.sample(range(BUFFER_BYTES // length), 50)
            sources = [ByteSpan(slot * length + phase, length) for slot in slots]
            targets = [(buffer, ByteSpan(page * length, length)) for page in pages]
            transport.read(target.info, sources, targets, DEADLINE_S)
            for there, (_, here) in zip(sources, targets, strict=True):
                wanted = segment.view[there.offset_bytes :][:length]
                assert np.array_equal(buffer[here.offset_bytes :][:length], wanted)


@each
def test_a_view_of_a_registered_buffer_is_a_target_too(
    transport: Transport, start: Callable[..., Target], seed: int
) -> None:
    target = start()
    buffer = np.zeros(BUFFER_BYTES, np.uint8)
    transport.register(buffer)
    with Segment.open(target.path) as segment:
        segment.view[:] = random_bytes(SEGMENT_BYTES, seed)
        view = buffer[4096:8192]
        transport.read(target.info, [ByteSpan(100, 500)], [(view, ByteSpan(10, 500))], DEADLINE_S)
        assert np.array_equal(buffer[4106:4606], segment.view[100:600])
    assert not buffer[:4106].any() and not buffer[4606:].any()


@each
def test_a_span_outside_the_segment_is_refused_before_anything_moves(
    transport: Transport, start: Callable[..., Target]
) -> None:
    target = start()
    with Segment.open(target.path) as segment:
        segment.view[:] = 0
    buffer = np.ones(BUFFER_BYTES, np.uint8)
    transport.register(buffer)
    good = (ByteSpan(0, 64), (buffer, ByteSpan(0, 64)))
    for there, here in [
        (ByteSpan(SEGMENT_BYTES - 63, 64), ByteSpan(64, 64)),
        (ByteSpan(-1, 64), ByteSpan(64, 64)),
        (ByteSpan(2**62, 64), ByteSpan(64, 64)),
        (ByteSpan(0, 64), ByteSpan(BUFFER_BYTES - 63, 64)),
        (ByteSpan(0, 64), ByteSpan(-64, 64)),
    ]:
        with pytest.raises(TransferFailed, match="outside"):
            transport.read(target.info, [good[0], there], [good[1], (buffer, here)], DEADLINE_S)
    assert buffer.all()  # not even the good span moved
    assert transport.counters.failures == 5


@each
def test_a_killed_node_fails_fast_and_a_new_life_of_it_works(
    transport: Transport, start: Callable[..., Target], seed: int
) -> None:
    first = start()
    buffer = np.zeros(BUFFER_BYTES, np.uint8)
    transport.register(buffer)
    transport.read(first.info, [ByteSpan(0, 4096)], [(buffer, ByteSpan(0, 4096))], DEADLINE_S)
    first.kill()
    started_s = time.monotonic()
    with pytest.raises(TransferFailed) as caught:
        transport.read(first.info, [ByteSpan(0, 4096)], [(buffer, ByteSpan(0, 4096))], DEADLINE_S)
    assert not isinstance(caught.value, TransferTimeout)
    assert time.monotonic() - started_s < DEADLINE_S / 2
    with pytest.raises(TransferFailed):  # and stays dead
        transport.read(first.info, [ByteSpan(0, 4096)], [(buffer, ByteSpan(0, 4096))], DEADLINE_S)
    second = start()
    with Segment.open(second.path) as segment:
        segment.view[:] = random_bytes(SEGMENT_BYTES, seed)
        transport.read(
            second.info, [ByteSpan(512, 4096)], [(buffer, ByteSpan(0, 4096))], DEADLINE_S
        )
        assert np.array_equal(buffer[:4096], segment.view[512 : 512 + 4096])
    assert transport.pending_targets() == []
    assert transport.counters.failures == 2


@each
def test_a_node_killed_in_the_middle_of_reads_hangs_nobody_and_serves_no_torn_batch(
    transport: Transport, start: Callable[..., Target], seed: int
) -> None:
    target = start()
    buffer = np.zeros(BUFFER_BYTES, np.uint8)
    transport.register(buffer)
    sources = [ByteSpan(at, 65536) for at in range(0, BUFFER_BYTES, 65536)]
    targets = [(buffer, span) for span in sources]
    is_reading, problems = threading.Event(), []
    with Segment.open(target.path) as segment:
        segment.view[:] = random_bytes(SEGMENT_BYTES, seed)
        wanted = segment.view[:BUFFER_BYTES].copy()

    def work() -> None:
        try:
            while True:
                buffer[:] = 0
                transport.read(target.info, sources, targets, DEADLINE_S)
                assert np.array_equal(buffer, wanted), "a read that ended well is not whole"
                is_reading.set()
        except Exception as error:
            problems.append(error)

    reader = threading.Thread(target=work)
    reader.start()
    assert is_reading.wait(DEADLINE_S)
    target.kill()
    reader.join(timeout=DEADLINE_S)
    assert not reader.is_alive(), "it hangs"
    assert [type(error) for error in problems] == [TransferFailed], problems
    assert transport.pending_targets() == []


@each
def test_a_node_that_was_never_there_is_a_failed_transfer(
    transport: Transport, start: Callable[..., Target]
) -> None:
    target = start()
    info = replace(target.info, segment_path="/dev/shm/mooncake-no-such")
    info = replace(info, agent_metadata=b"no", data_address="127.0.0.1:1")
    buffer = np.zeros(64, np.uint8)
    transport.register(buffer)
    with pytest.raises(TransferFailed, match="t0"):
        transport.read(info, [ByteSpan(0, 64)], [(buffer, ByteSpan(0, 64))], DEADLINE_S)


@each
def test_threads_may_share_a_transport(
    transport: Transport, start: Callable[..., Target], seed: int
) -> None:
    targets, length = [start("t0"), start("t1")], 64 * 1024
    buffers = [np.zeros(BUFFER_BYTES, np.uint8) for _ in range(3)]
    for buffer in buffers:
        transport.register(buffer)
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        segments = [stack.enter_context(Segment.open(target.path)) for target in targets]
        for index, segment in enumerate(segments):
            segment.view[:] = random_bytes(SEGMENT_BYTES, seed + index)

        def work(number: int) -> None:
            chance, buffer = random.Random(seed + number), buffers[number]
            for _ in range(30):
                which = chance.randrange(2)
                slots = chance.sample(range(SEGMENT_BYTES // length), 16)
                sources = [ByteSpan(slot * length, length) for slot in slots]
                local = [(buffer, ByteSpan(page * length, length)) for page in range(16)]
                transport.read(targets[which].info, sources, local, DEADLINE_S)
                for page, slot in enumerate(slots):
                    wanted = segments[which].view[slot * length :][:length]
                    if not np.array_equal(buffer[page * length :][:length], wanted):
                        problems.append(f"thread {number}: page {page}")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems
    assert transport.counters.reads == 90
    assert transport.counters.read_bytes == 90 * 16 * length
