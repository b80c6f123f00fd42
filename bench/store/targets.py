"""The targets of the store, from the medians of each round.

A ratio is taken within a round, whose ways took turns. The median of the rounds' ratios is compared
with its goal; the least and the greatest are in `why`.

Not here: measuring (__main__.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.store.ways import MB
from loadtest.harness.result import Target

SMALL = 256 * 1024
SIZES = (SMALL, MB)
NAMES = {SMALL: "256k", MB: "1m"}
EXIST_US = 100.0
Seconds = Mapping[str, Sequence[float]]  # of a batch, by way: the median of each round


class Goal(NamedTuple):
    name: str
    peer: str  # way
    ours: str  # way
    goals: tuple[float | None, float | None]  # by SIZES; None: no goal for this size
    why: str = ""


def beside_mooncake(way: str) -> str:
    """Its name where it takes turns with Mooncake."""
    return f"{way}, in turns with mooncake"


OTHER_NODE = (
    "ours by NIXL on one host (CMA: one copy by the kernel), two threads, verified; theirs by TCP "
    "over loopback, not verified"
)
OWN_NODE = "ours out of the mapped segment, verified; theirs by TCP over loopback, not verified"
IN_MEMORY = (
    "not verified, ours out of the segment of another process, theirs within its own (memcpy)"
)
GET_TCP, PUT_TCP = "mooncake get, TCP", "mooncake put, TCP"
GET_OWN, PUT_OWN = "mooncake get, own process", "mooncake put, own process"
FROM_SEGMENT, TO_SEGMENT = "memcpy from segment", "memcpy to segment"
SHARED = "by two threads, beside one of memcpy"
LANES = "two threads beside raw NIXL on two lanes"
GOALS = (
    Goal("get_over_mooncake", GET_TCP, beside_mooncake("get nixl"), (1.3, 2.0), OTHER_NODE),
    Goal("put_over_mooncake", PUT_TCP, beside_mooncake("put nixl"), (1.3, 2.0), OTHER_NODE),
    Goal("get_own_node_over_mooncake", GET_TCP, beside_mooncake("get"), (2.0, 2.3), OWN_NODE),
    Goal("put_own_node_over_mooncake", PUT_TCP, beside_mooncake("put"), (1.8, 2.0), OWN_NODE),
    Goal(
        "get_local_over_mooncake_own_process",
        GET_OWN,
        beside_mooncake("get unverified"),
        (1.0, 1.0),
        IN_MEMORY,
    ),
    Goal(
        "put_local_over_mooncake_own_process",
        PUT_OWN,
        beside_mooncake("put unverified"),
        (1.0, 1.0),
        IN_MEMORY,
    ),
    Goal("get_local_over_memcpy", FROM_SEGMENT, "get", (0.70, 0.70), f"verified, {SHARED}"),
    Goal("put_local_over_memcpy", TO_SEGMENT, "put", (0.65, 0.65), f"verified, {SHARED}"),
    Goal("get_local_1_thread_over_memcpy", FROM_SEGMENT, "get, 1 thread", (0.70, 0.70), "verified"),
    Goal("put_local_1_thread_over_memcpy", TO_SEGMENT, "put, 1 thread", (0.65, 0.65), "verified"),
    Goal("get_local_unverified_over_memcpy", FROM_SEGMENT, "get unverified", (None, 0.85), SHARED),
    Goal("put_local_unverified_over_memcpy", TO_SEGMENT, "put unverified", (None, 0.75), SHARED),
    Goal(
        "get_nixl_unverified_over_raw_nixl",
        "raw nixl read, 2 lanes",
        "get nixl unverified",
        (0.85, 0.85),
        LANES,
    ),
    Goal(
        "get_nixl_unverified_1_thread_over_raw_nixl",
        "raw nixl read",
        "get nixl unverified, 1 thread",
        (None, 0.85),
    ),
)
ROOM = "how much two processes of memcpy alone get more than one"


def targets(
    seconds: Mapping[int, Seconds],
    others: Seconds,
    clients: Mapping[str, float],
    ssd: Mapping[str, float],
    why: Mapping[str, str],
) -> list[Target]:
    """`seconds` of each size, `others` of ways without a size; `why`: the reason why "peer" or
    "ssd" was not measured."""
    found = [
        _of_rounds(f"{goal.name}_{NAMES[size]}", ">=", least, seconds[size], goal, why["peer"])
        for goal in GOALS
        for size, least in zip(SIZES, goal.goals, strict=True)
        if least is not None
    ]
    room = clients["memcpy 2"] / clients["memcpy 1"]
    two = clients["get 2"] / clients["get 1"]
    note = f"{ROOM}: {room:.2f} times"
    found.append(Target("two_clients_over_one", round(two, 3), ">=", 1.6, note))
    from_ssd = round(ssd["raw"] / ssd["get"], 3) if ssd else None
    found.append(Target("ssd_get_over_raw", from_ssd, ">=", 0.7, why["ssd"]))
    exist_us = statistics.median(others["exist"]) * 1e6
    why_exist = "asked again and again"
    if "exist in turns" in others:
        in_turns_us = statistics.median(others["exist in turns"]) * 1e6
        why_exist += f"; {in_turns_us:.1f} us after another process's turn"
    found.append(Target("exist_1000_us", round(exist_us, 1), "<=", EXIST_US, why_exist))
    asked = Goal("exist_1000_over_mooncake", "exist in turns", "mooncake exist", (1.0, 1.0))
    found.append(_of_rounds(asked.name, "<=", 1.0, others, asked, why["peer"]))
    return found


def _of_rounds(name: str, op: str, goal: float, seconds: Seconds, of: Goal, no_peer: str) -> Target:
    """The peer's seconds over ours."""
    if of.peer not in seconds or of.ours not in seconds:
        return Target(name, None, op, goal, no_peer)
    ratios = [a / b for a, b in zip(seconds[of.peer], seconds[of.ours], strict=True)]
    said = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
    why = f"{of.why}; {said}" if of.why else said
    return Target(name, round(statistics.median(ratios), 3), op, goal, why)
