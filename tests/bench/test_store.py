"""The targets beside Mooncake name the paths compared, and come from rounds in turns."""

from __future__ import annotations

from bench.store.targets import GOALS, SIZES, targets
from loadtest.harness.result import Target

CLIENTS = {"memcpy 1": 1.0, "memcpy 2": 2.0, "get 1": 1.0, "get 2": 2.0}
OURS = {goal.ours for goal in GOALS} | {goal.peer for goal in GOALS if "mooncake" not in goal.peer}


def found(theirs: dict[str, list[float]], why: str) -> dict[str, Target]:
    ours = {way: [1.0, 1.0, 1.0] for way in OURS}
    exist = {"exist": [1e-4] * 3} | (
        {"exist in turns": [1e-4] * 3, "mooncake exist": [2e-4] * 3} if theirs else {}
    )
    made = targets(
        dict.fromkeys(SIZES, ours | theirs), exist, CLIENTS, {}, {"peer": why, "ssd": "no SSD"}
    )
    return {target.name: target for target in made}


def test_what_is_compared_with_mooncake_is_said() -> None:
    theirs = {goal.peer: [2.0, 3.0, 30.0] for goal in GOALS if "mooncake" in goal.peer}
    by_name = found(theirs, "")
    for name in ("256k", "1m"):
        over_nodes = by_name[f"get_over_mooncake_{name}"]
        assert over_nodes.value == 3.0 and "2.00 to 30.00 in 3 rounds" in over_nodes.why
        assert "CMA" in over_nodes.why and "TCP" in over_nodes.why
        assert "memcpy" in by_name[f"get_local_over_mooncake_own_process_{name}"].why
    assert by_name["exist_1000_over_mooncake"].value == 0.5


def test_a_ratio_is_taken_within_a_round() -> None:
    seconds = {way: [1.0, 10.0, 2.0] for way in OURS}  # the machine was busy in one of them
    made = targets(
        dict.fromkeys(SIZES, seconds), {"exist": [1e-4]}, CLIENTS, {}, {"peer": "-", "ssd": "-"}
    )
    of_memcpy = [target for target in made if "memcpy" in target.name]
    assert of_memcpy and all(target.value == 1.0 for target in of_memcpy)


def test_without_mooncake_every_target_of_it_says_so() -> None:
    by_name = found({}, "give --peer-python")
    of_peer = [target for name, target in by_name.items() if "mooncake" in name]
    assert len(of_peer) == 13
    assert {(target.value, target.why) for target in of_peer} == {(None, "give --peer-python")}
