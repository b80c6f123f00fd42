"""The directory benchmark fills real directories over the wire and asks both."""

from __future__ import annotations

import pytest

from bench.directory import ASKED, measure

pytestmark = pytest.mark.servers


def test_both_directories_are_filled_asked_and_shown() -> None:
    rows, targets = measure(few=ASKED, many=9_000, rounds=3, eviction="lru", seed=1)
    assert [row["keys"] for row in rows] == [ASKED, 9_000]
    for row in rows:
        times = [value for name, value in row.items() if name.endswith("_ms")]
        assert len(times) == 3 and all(isinstance(value, float) and value > 0 for value in times)
    assert [target.name for target in targets] == ["directory_gib", "exist_1000_over_few_keys"]
    assert all(target.value is None and "10,000,000" in target.why for target in targets)
