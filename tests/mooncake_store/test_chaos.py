"""Real processes, killed and stopped at random under load, for 20 seconds; see `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_store.client.client import StoreClient
from tests.chaos.__main__ import run
from tests.chaos.blocks import block_of, is_block_of, key_of
from tests.chaos.monkey import Stop
from tests.chaos.site import ChaosSite
from tests.chaos.verdict import assert_in_time, assert_kept


@pytest.mark.servers
@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_prank_makes_a_read_wrong_a_call_hang_or_a_living_nodes_block_go(seed: int) -> None:
    done, counts = run(20.0, seed)
    assert sum(done.values()) >= 10, f"the monkey slept: {done}"
    assert counts["hits"] > 100 and counts["blocks put"] > 100, f"no load: {counts}"
    assert counts["keepsakes found"] > 5, f"nothing to find again: {counts}"


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
def test_a_block_that_is_gone_from_a_living_node_is_noticed(tmp_path: Path, seed: int) -> None:
    site = ChaosSite(tmp_path, seed, seconds=1.0)
    try:
        keys = [key_of("kept", number) for number in range(3)]
        with StoreClient(site.address, "s0", "mapped") as store:
            assert all(store.put(keys, [block_of(key) for key in keys]))
            seen = [{"kind": "kept", "key": key.hex()} for key in keys]
            assert assert_kept(site, seen) == 3
            store.remove(keys[1:2])
        with pytest.raises(AssertionError, match="1 of 3 blocks are lost"):
            assert_kept(site, seen)
    finally:
        site.directory.close()
        site.kill_all()
