"""The sum of PSS over groups of real processes."""

from __future__ import annotations

import os
import subprocess
import sys

from mooncake_store.process.process_memory import group_of, pss_bytes

MIB = 2**20
HOLDS_64_MIB = "held = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()"


def test_a_process_belongs_to_its_closest_named_ancestor() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 10}
    named = {10: "launcher", 11: "workers"}
    assert [group_of(pid, parents, named) for pid in (10, 11, 12, 20, 1, 99)] == [
        "launcher",
        "workers",
        "workers",
        "launcher",
        None,
        None,
    ]


def test_the_memory_of_a_child_counts_in_its_group_or_in_that_of_its_parent() -> None:
    command = [sys.executable, "-c", HOLDS_64_MIB]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == b"ready\n"
        own = {"own": [os.getpid()]}
        apart = pss_bytes(own | {"child": [child.pid]})
        together = pss_bytes(own)["own"]
        child.stdin.write(b"\n")
    assert 64 * MIB < apart["child"] < 96 * MIB
    # The test's own memory changes by little between two readings.
    assert abs(together - apart["own"] - apart["child"]) < 16 * MIB


def test_a_process_that_has_ended_counts_as_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert pss_bytes({"gone": [child.pid]}) == {"gone": 0}
