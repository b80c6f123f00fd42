"""What must be true when the monkey has gone, and what was seen on the way.

No read returned wrong bytes; nothing took longer than its deadline and a margin; every block that
was committed on the node that lived all along is there, right to the last byte; nobody holds memory
any more; all processes end when they are told to, and leave nothing in /dev/shm.

Not here: what happened (monkey.py, client.py).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from mooncake_store.errors import StoreError
from tests.chaos.client import DEADLINE_S
from tests.chaos.losses import directory_state, explained, unreadable
from tests.chaos.monkey import Stop
from tests.chaos.site import QUARANTINE_S, ChaosSite, wait_for

MARGIN_S = 6.0  # three calls to a directory that does not answer, 2 s each
BACK_S = 60.0  # 18 s were seen where 27 processes wanted two cores
SETTLED_S = 30.0  # until a node that passed for dead has said what it holds
LEASE_S_MAX = 130.0  # a node killed while it spilled leaves leases of two minutes


def end_clients(site: ChaosSite) -> None:
    for name in site.clients:
        status = site.members[name].end()
        assert status == 0, f"client {name} failed ({status}):\n{site.members[name].tail()}"


def notes(site: ChaosSite) -> list[dict[str, Any]]:
    """What clients wrote down; a killed one may have left half a line."""
    found = []
    for line in site.notes.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            assert '"kind"' in line, line
    return found


def assert_in_time(seen: list[dict[str, Any]], stops: list[Stop]) -> None:
    """A call may take its deadline and the margin, and the time its own process stood still."""
    for note in seen:
        if note["kind"] != "slow":
            continue
        start_s, end_s = note["start_s"], note["start_s"] + note["seconds"]
        frozen_s = sum(
            max(0.0, min(stop.end_s + 0.1, end_s) - max(stop.start_s, start_s))
            for stop in stops
            if stop.name == note["name"]
        )
        took_s = note["seconds"] - frozen_s
        assert took_s <= DEADLINE_S + MARGIN_S, f"hung for {took_s:.1f} s: {note}"


def assert_kept(site: ChaosSite, seen: list[dict[str, Any]], settled_s: float = SETTLED_S) -> int:
    """Every block that s0 was given and confirmed is readable within `settled_s`.

    A node that was frozen may count as dead until its next report, at most a second later. Its
    blocks are misses until the node has reported its inventory. No client stores a sole copy twice,
    so a copy that is found again was never lost.
    """
    keys = [bytes.fromhex(note["key"]) for note in seen if note["kind"] == "kept"]
    assert len(keys) == len(set(keys))
    until_s = time.monotonic() + settled_s
    lost = unreadable(site, keys)
    while lost and time.monotonic() < until_s:
        print(f"{len(lost)} of {len(keys)} blocks cannot be read yet: {directory_state(site)}")
        time.sleep(0.2)  # poll
        lost = unreadable(site, lost)
    assert not lost, (
        f"{len(lost)} of {len(keys)} blocks are lost on a node that lived:\n{explained(site, lost)}"
    )
    return len(keys)


def everybody_is_back(site: ChaosSite) -> bool:
    expected = {"s0", "s1", "s1/ssd", "s2"}
    try:
        stats = site.directory.stats()
    except StoreError:
        return False
    return {node.node_id for node in stats.nodes if node.is_open} == expected


def memory_is_back(site: ChaosSite) -> bool:
    """Nobody leases or writes anything, and nothing rests."""
    try:
        stats = site.directory.stats()
    except StoreError:
        return False
    busy = [
        node
        for node in stats.nodes
        if node.writing_blocks
        or node.quarantined_units
        or node.used_units + node.free_units != node.units
    ]
    return not busy and not stats.leases and not stats.owners and not stats.ephemeral


def judge(site: ChaosSite, stops: list[Stop]) -> Counter[str]:
    """All of the above, in order; what the clients counted."""
    wait_for("all nodes registered and open again", BACK_S, lambda: everybody_is_back(site))
    end_clients(site)
    seen = notes(site)
    wrong = [note for note in seen if note["kind"] == "wrong"]
    assert not wrong, f"wrong bytes: {wrong}"
    assert_in_time(seen, stops)
    counts: Counter[str] = Counter()
    for note in seen:
        if note["kind"] == "end":
            longest_ms = max(counts["longest_ms"], note["counts"].get("longest_ms", 0))
            counts.update(note["counts"])
            counts["longest_ms"] = longest_ms
    counts["sole copies found"] = assert_kept(site, seen)
    wait_for(
        "leases, writers and quarantines gone",
        LEASE_S_MAX + QUARANTINE_S,
        lambda: memory_is_back(site),
    )
    return counts
