"""Frontends at a real directory: each hears what the others routed, and decides without it."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.frontend.cluster_view import ClusterView
from backends.frontend.decisions.latest import Decided
from backends.frontend.routing_notes import NOTES_MAX, pack_notes, unpack_notes
from conductor.config import ConductorConfig
from conductor.notes import (
    TENANTS_NOTED,
    EndedNote,
    NoteBatch,
    PrefilledNote,
    RoutedNote,
    UsageNote,
)
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.records.events import FrontendNoted
from mooncake_store.wire.directory_protocol import NOTES_BYTES_MAX
from tests.conductor.fleet import node, prompt, worker
from tests.mooncake_store.processes import DirectoryProcess

WAIT_S = 30.0
ROUTED = RoutedNote(
    number=3,
    at_s=99.5,
    prefill=("p0", "w1"),
    decode=("d0", "w1"),
    new_tokens=70,
    cached_tokens=64,
    output_tokens_max=10,
    order_key_s=99.75,
    queue_s=0.0,
    transfer_s=0.25,
    prefill_s=0.5,
    tbt_s=0.125,
    send_s=0.0,
    fetch_node="s1",
    tenant="t",
)
BATCH = NoteBatch(
    frontend="f",
    number=7,
    sent_s=100.0,
    routed=(ROUTED,),
    prefilled=(PrefilledNote(1, 99.0, 64, 0.5),),
    ended=(EndedNote(2, 99.0, 12),),
    is_last=True,
    wanted_per_s=1.5,
    wanted_of={"": 1.0, "tenant": 0.25},
    usage=(UsageNote(99.25, "t", 1, 300), UsageNote(98.0, "t", 0, -100)),
)


class Listener(ClusterView):
    """Can be waited for: whatever changes it says so."""

    def __init__(self, directory: DirectoryProcess, **config: Any) -> None:
        self.changed = threading.Condition()
        super().__init__(ConductorConfig(**config), directory.address, directory.events_address)

    def say(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _on_snapshot(self, snapshot: Any) -> None:
        super()._on_snapshot(snapshot)
        self.say()

    def _on_events(self, events: Sequence[Any]) -> None:
        super()._on_events(events)
        self.say()

    def notes_waiting(self) -> tuple[int, int]:
        self.say()
        return super().notes_waiting()

    def wait_for(self, what: str, holds: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, WAIT_S), f"{what}: {self.stats()}"

    def routed(self, name: str, prompt_tokens: int = 700) -> Decided:
        found = self.decide(prompt(name, prompt_tokens=prompt_tokens))
        assert isinstance(found, Decided), found
        return found


@pytest.fixture
def process(tmp_path: Path) -> Iterator[DirectoryProcess]:
    with DirectoryProcess(tmp_path, "--worker-ttl-s", "600", "--node-ttl-s", "600") as started:
        yield started


def register(directory: DirectoryProcess) -> None:
    with DirectoryClient(directory.address) as client:
        for number in range(2):
            client.register_node(node(f"s{number}"))
            client.register_worker(worker(f"p{number}", "prefill", f"s{number}"))
            client.register_worker(worker(f"d{number}", "decode", f"s{number}"))


@pytest.fixture
def views(process: DirectoryProcess) -> Iterator[list[Listener]]:
    """Two frontends that know each other."""
    register(process)
    made = [Listener(process, report_s_max=60.0) for _ in range(2)]
    for view in made:
        view.wait_for("workers", lambda view=view: view.workers_live("decode") == 2)
        view.wait_for("another", lambda view=view: view.stats().frontends_known == 1)
    yield made
    for view in made:
        view.close()


def test_what_one_frontend_routed_the_other_has_reserved(views: list[Listener]) -> None:
    first, second = views
    taken = first.routed("r0").route
    second.wait_for("the note", lambda: second.stats().routed_elsewhere == 1)
    other = second.routed("r1").route
    assert (other.prefill, other.decode) != (taken.prefill, taken.decode)
    assert other.prefill.worker_id != taken.prefill.worker_id
    first.prefill_finished("r0", 0, 0.5)
    first.finished("r0", 10)
    second.wait_for("the end", lambda: second.stats().routed_elsewhere == 0)
    first.wait_for("the other's note", lambda: first.stats().routed_elsewhere == 1)
    second.finished("r1")
    first.wait_for("the other's end", lambda: first.stats().routed_elsewhere == 0)
    for view in views:
        view._check()
        assert view.stats().note_batches_missed == 0


def test_many_notes_leave_in_several_batches_and_all_arrive(views: list[Listener]) -> None:
    first, second = views
    for number in range(300):
        first.decide(prompt(f"r{number}", prompt_tokens=10, is_resumed=True))
    live = first.stats().in_flight
    assert live > 64, "too few for a second batch"
    second.wait_for("the notes", lambda: second.stats().routed_elsewhere == live)
    for number in range(300):
        first.finished(f"r{number}")
    second.wait_for("the ends", lambda: second.stats().routed_elsewhere == 0)
    assert second.stats().note_batches_missed == 0
    second._check()


def test_a_frontend_that_closes_is_forgotten_at_once(views: list[Listener]) -> None:
    first, second = views
    first.routed("r0")
    second.wait_for("the note", lambda: second.stats().routed_elsewhere == 1)
    first.close()
    second.wait_for("its last words", lambda: second.stats().frontends_known == 0)
    assert second.stats().routed_elsewhere == 0
    second._check()


def test_without_the_directory_each_decides_alone_and_they_meet_again(
    views: list[Listener], process: DirectoryProcess
) -> None:
    first, second = views
    process.end(signal.SIGKILL)
    for number in range(20):
        first.routed(f"r{number}", prompt_tokens=10)
        first.finished(f"r{number}")
    first.wait_for("what it cannot send", lambda: first.notes.batches_unsent > 0)
    for view in views:
        view.wait_for("silence", lambda view=view: view.stats().frontends_known == 0)
        view.routed("alone")
        view._check()
        view.finished("alone")
    process.start()
    register(process)
    for view in views:
        view.wait_for("each other", lambda view=view: view.stats().frontends_known == 1)
    first.routed("r20")
    second.wait_for("the note", lambda: second.stats().routed_elsewhere == 1)
    second._check()


def test_a_frozen_directory_delays_no_decision(
    views: list[Listener], process: DirectoryProcess
) -> None:
    first, second = views
    process.process.send_signal(signal.SIGSTOP)
    decided = threading.Event()

    def decide() -> None:
        for number in range(500):
            first.decide(prompt(f"r{number}", prompt_tokens=10))
            first.finished(f"r{number}")
        decided.set()

    threading.Thread(target=decide, daemon=True).start()
    assert decided.wait(WAIT_S), "a decision waited for a directory that does not answer"
    process.process.send_signal(signal.SIGCONT)
    first.routed("last")
    second.wait_for("the last", lambda: second.stats().routed_elsewhere == 1)
    second._check()


def test_a_batch_of_the_longest_names_that_clients_and_operators_may_choose_fits() -> None:
    longest = chr(0x10FFFF) * 256  # four bytes each
    routed = replace(
        ROUTED,
        prefill=(longest, longest),
        decode=(longest, longest),
        fetch_node=longest,
        tenant=longest,
    )
    tenants = {longest[:-2] + f"{number:02}": 1.0 for number in range(TENANTS_NOTED)}
    batch = replace(BATCH, routed=(routed,) * NOTES_MAX, wanted_of=tenants)
    packed = pack_notes(batch)
    assert len(packed) <= NOTES_BYTES_MAX
    assert unpack_notes(FrontendNoted(batch.frontend, batch.number, packed)) == batch


def test_notes_are_read_as_they_were_written() -> None:
    event = FrontendNoted("f", 7, pack_notes(BATCH))
    assert unpack_notes(event) == BATCH


@pytest.mark.parametrize(
    "change",
    [
        {"new_tokens": 0},
        {"cached_tokens": -1},
        {"prefill_s": math.nan},
        {"at_s": math.inf},
        {"queue_s": -1.0},
        {"order_key_s": math.nan},
        {"tenant": "t" * 300},
        {"number": -1},
        {"output_tokens_max": 2**40},
    ],
    ids=lambda change: next(iter(change)),
)
def test_notes_that_break_a_bound_are_not_taken(change: dict[str, Any]) -> None:
    bad = replace(BATCH, routed=(replace(ROUTED, **change),))
    assert unpack_notes(FrontendNoted("f", 7, pack_notes(bad))) is None


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x00" * 100, msgspec.msgpack.encode([1, 2])])
def test_bytes_that_are_no_notes_are_not_taken(raw: bytes) -> None:
    assert unpack_notes(FrontendNoted("f", 7, raw)) is None


def test_unreadable_notes_count_as_missing(
    views: list[Listener], process: DirectoryProcess
) -> None:
    first, _ = views
    with DirectoryClient(process.address) as client:
        client.note_routed("stranger", 1, pack_notes(replace(BATCH, is_last=False)))
        client.note_routed("stranger", 2, b"nonsense")
        client.note_routed("stranger", 3, pack_notes(NoteBatch("stranger", 3, 100.0)))
    first.wait_for("the gap", lambda: first.stats().note_batches_missed == 1)
    assert first.stats().routed_elsewhere == 0
    first._check()
