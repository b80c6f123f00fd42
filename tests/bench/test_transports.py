"""The transport benchmark runs against real nodes and reports each way beside the limit."""

from __future__ import annotations

import pytest

from bench.transports import measure
from mooncake_store.layout import KvLayout
from mooncake_store.transports.nixl_agent import NixlUnavailable, load_nixl

pytestmark = pytest.mark.servers


def test_each_way_of_reading_is_measured_in_the_same_run() -> None:
    try:
        load_nixl()
    except NixlUnavailable as error:
        pytest.skip(str(error))
    layout = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32", block_tokens=8)
    rows = measure(layout, blocks=4, total_blocks=16, rounds=3, seed=1)
    assert [row["transport"] for row in rows] == ["memcpy", "mapped", "nixl"]
    assert rows[0]["over_memcpy"] == 1.0
    assert all(isinstance(row["gb_per_s"], float) and row["gb_per_s"] > 0 for row in rows)
