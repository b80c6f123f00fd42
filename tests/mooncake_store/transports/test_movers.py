"""How a batch is cut into parts: nothing is lost or doubled, none is longer than it may be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mooncake_store.transports.movers import COPIED_BYTES, copied_parts, parts_of


@given(
    blocks=st.integers(0, 40),
    block_bytes=st.sampled_from([0, 1, 4_096, 2**20, 3 * 2**20, 2**26]),
    threads=st.integers(1, 4),
)
def test_the_clock_is_looked_at_often_and_each_thread_has_a_block(
    blocks: int, block_bytes: int, threads: int
) -> None:
    parts = copied_parts(range(blocks), block_bytes, threads)
    assert [block for part in parts for block in part] == list(range(blocks))
    most = max(COPIED_BYTES, threads * block_bytes)
    assert all(0 < len(part) * block_bytes <= most or block_bytes == 0 for part in parts)
    assert all(len(part) >= threads for part in parts[:-1])


@given(sizes_bytes=st.lists(st.integers(0, 100)), part_bytes=st.integers(1, 120))
def test_consecutive_items_are_joined_as_long_as_they_fit(
    sizes_bytes: list[int], part_bytes: int
) -> None:
    parts = parts_of(range(len(sizes_bytes)), sizes_bytes.__getitem__, part_bytes)
    assert [item for part in parts for item in part] == list(range(len(sizes_bytes)))
    for part in parts:
        assert part and (sum(sizes_bytes[item] for item in part) <= part_bytes or len(part) == 1)
    for part, following in pairwise(parts):
        joined = sum(sizes_bytes[item] for item in [*part, following[0]])
        assert joined > part_bytes, "both would have fitted"
