"""Real processes, killed and stopped at random under load, for 20 seconds; see `make chaos`."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from mooncake_store.client.client import StoreClient
from tests.chaos.__main__ import run
from tests.chaos.blocks import block_of, is_block_of, key_of
from tests.chaos.client import Options
from tests.chaos.losses import unreadable
from tests.chaos.monkey import Stop
from tests.chaos.site import ChaosSite, Member, wait_for
from tests.chaos.verdict import assert_in_time, assert_kept


@pytest.mark.servers
@pytest.mark.long
@pytest.mark.timeout(600)
def test_under_faults_every_read_is_right_every_call_ends_and_living_nodes_keep_their_blocks(
    seed: int,
) -> None:
    done, counts = run(20.0, seed)
    assert sum(done.values()) >= 10, f"the monkey slept: {done}"
    # How much they did is up to the machine and to how long the directory was dead.
    assert counts["hits"] > 0 and counts["blocks put"] > 0, f"no load: {counts}"
    assert counts["sole copies found"] > 0, f"nothing to find again: {counts}"


def test_one_wrong_byte_and_a_block_of_another_key_are_noticed() -> None:
    key, other = key_of("a", 1), key_of("a", 2)
    block = block_of(key).copy()
    assert is_block_of(key, block) and not is_block_of(other, block)
    assert is_block_of(key, block[7:500], 7) and not is_block_of(key, block[7:500], 8)
    block[-1] ^= 1
    assert not is_block_of(key, block)


def test_a_call_that_hangs_is_noticed_unless_its_own_process_stood_still() -> None:
    slow = {"kind": "slow", "name": "near", "step": "get", "start_s": 100.0, "seconds": 12.0}
    with pytest.raises(AssertionError, match=r"hung for 12\.0 s"):
        assert_in_time([slow], [Stop("mapped", 100.0, 112.0)])
    assert_in_time([slow], [Stop("near", 101.0, 105.0)])


@pytest.mark.servers
def test_a_process_that_is_told_to_end_while_it_starts_ends_as_any_other(tmp_path: Path) -> None:
    options = Options(
        name="writer",
        directory=f"ipc://{tmp_path}/nobody",
        node_id="s0",
        transports="mapped",
        seed=1,
        sole_copies=0,
        safe="s0",
        others=["s1"],
        log=str(tmp_path / "notes"),
    )
    command = ["tests.chaos.client", msgspec.json.encode(asdict(options)).decode()]
    member = Member("writer", tmp_path, command)
    try:
        assert member.end() == 0
        member.start()
        assert member.end() == 0
    finally:
        if member.is_running:
            member.kill()


@pytest.mark.servers
def test_a_block_that_is_gone_from_a_living_node_is_noticed(tmp_path: Path, seed: int) -> None:
    site = ChaosSite(tmp_path, seed, seconds=1.0)
    try:
        keys = [key_of("kept", number) for number in range(3)]
        with StoreClient(site.address, "s0", "mapped") as store:
            assert all(store.put(keys, [block_of(key) for key in keys]))
            seen = [{"kind": "kept", "key": key.hex()} for key in keys]
            assert assert_kept(site, seen) == 3
            store.remove(keys[1:2])
        # What others remove is found for a moment longer: the host's index replica follows events.
        wait_for("the removal is seen", 30.0, lambda: unreadable(site, keys) == keys[1:2])
        with pytest.raises(AssertionError, match="1 of 3 blocks are lost"):
            assert_kept(site, seen, settled_s=0.0)
    finally:
        site.directory.close()
        site.kill_all()


@pytest.mark.servers
def test_blocks_of_a_node_that_passed_for_dead_are_not_taken_for_lost(
    tmp_path: Path, seed: int
) -> None:
    site = ChaosSite(tmp_path, seed, seconds=1.0)
    try:
        keys = [key_of("kept", number) for number in range(20)]
        with StoreClient(site.address, "s0", "mapped") as store:
            assert all(store.put(keys, [block_of(key) for key in keys]))
        site.members["s0"].stop()
        wait_for("s0 passes for dead", 30.0, lambda: "s0" not in registered(site))
        goes_on = threading.Timer(1.0, site.members["s0"].go_on)
        goes_on.start()
        assert assert_kept(site, [{"kind": "kept", "key": key.hex()} for key in keys]) == 20
        goes_on.join()
    finally:
        site.directory.close()
        site.kill_all()


def registered(site: ChaosSite) -> set[str]:
    return {node.node_id for node in site.directory.stats().nodes}
