"""Real processes, killed and stopped at random under load, for 20 seconds; see `make chaos`."""

from __future__ import annotations

from tests.chaos.__main__ import run


def test_no_prank_makes_a_read_wrong_a_call_hang_or_a_living_nodes_block_go(seed: int) -> None:
    done, counts = run(20.0, seed)
    assert sum(done.values()) >= 10, f"the monkey slept: {done}"
    assert counts["hits"] > 100 and counts["blocks put"] > 100, f"no load: {counts}"
    assert counts["keepsakes found"] > 5, f"nothing to find again: {counts}"
