"""The targets beside Mooncake name the paths compared, its fastest local one included."""

from __future__ import annotations

from loadtest.bench.store.__main__ import ONE_THREAD, SIZES, targets
from loadtest.bench.store.ways import MB

WAYS = (
    "memcpy from segment", "memcpy to segment", "get", "put", "get unverified", "put unverified",
    "raw nixl read", "get nixl", "put nixl", ONE_THREAD,
)  # fmt: skip
OURS = dict.fromkeys(WAYS, 1.0)
CLIENTS = {"memcpy 1": 1.0, "memcpy 2": 2.0, "get 1": 1.0, "get 2": 2.0}


def found(theirs: dict[str, dict[str, float]], own: dict[str, dict[str, float]], why: str) -> dict:
    seconds = {size: dict(OURS) for size in SIZES}
    seconds[MB]["get"] = 4.0  # verifying is dear here
    made = targets(seconds, CLIENTS, {}, 1.0, theirs, own, {"peer": why, "ssd": "no SSD"})
    return {target.name: target for target in made}


def test_what_is_compared_with_mooncake_is_said() -> None:
    tcp = {str(size): {"get_s": 3.0, "put_s": 4.0} for size in SIZES} | {"exist_1000": {"s": 2.0}}
    own = {str(size): {"get_s": 0.5, "put_s": 2.0} for size in SIZES}
    by_name = found(tcp, own, "")
    for name in ("256k", "1m"):
        over_nodes = by_name[f"get_over_mooncake_{name}"]
        assert over_nodes.value == 3.0
        assert "CMA" in over_nodes.why and "TCP" in over_nodes.why
        local = by_name[f"get_local_over_mooncake_own_process_{name}"]
        assert local.value == 0.5 and "memcpy" in local.why and not local.is_met
        assert by_name[f"put_local_over_mooncake_own_process_{name}"].value == 2.0
    assert "0.12" in by_name["get_local_over_mooncake_own_process_1m"].why  # ours, verified


def test_without_mooncake_every_target_of_it_says_so() -> None:
    by_name = found({}, {}, "give --peer-python")
    of_peer = [target for name, target in by_name.items() if "mooncake" in name]
    assert len(of_peer) == 9
    assert {(target.value, target.why) for target in of_peer} == {(None, "give --peer-python")}
