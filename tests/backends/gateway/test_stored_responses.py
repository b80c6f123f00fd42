"""The file of stored responses: bounds, tenants, and several processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from backends.gateway.responses import stored
from backends.gateway.responses.stored import StoredResponses
from backends.statuses import HttpRefusal

HOUR_S = 3600.0


def response(number: int, size_bytes: int = 0) -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [], "filler": "x" * size_bytes}


def held_bytes(held: StoredResponses, tenant: str) -> int:
    rows = held._file.execute("SELECT bytes FROM responses WHERE tenant = ?", (tenant,))
    return sum(size_bytes for (size_bytes,) in rows)


def test_random_sizes_stay_within_the_limit_of_each_tenant_and_the_newest_are_kept() -> None:
    chance, limit = random.Random(4), 10_000
    held = StoredResponses()
    for number in range(2_000):
        tenant = chance.choice(["a", "b"])
        size_bytes = chance.choice([10, 1_000, chance.randrange(9_000)])
        held.add(tenant, limit, response(number, size_bytes), [])
        assert held.get(f"resp_{number}", tenant)
        for each in ("a", "b"):
            assert held_bytes(held, each) <= limit
    held.close()


def test_a_response_over_the_limit_is_not_kept_and_takes_no_other_with_it() -> None:
    held = StoredResponses()
    held.add("a", 1_000, response(1), [])
    held.add("a", 1_000, response(2, 2_000), [])
    with pytest.raises(HttpRefusal):
        held.get("resp_2", "a")
    assert held.get("resp_1", "a")


def test_old_responses_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1e9
    monkeypatch.setattr(stored.time, "time", lambda: now_s)
    held = StoredResponses()
    held.add("a", 1_000, response(1), [])
    now_s += 24 * HOUR_S
    assert held.get("resp_1", "a")
    now_s += 1.0
    with pytest.raises(HttpRefusal):
        held.get("resp_1", "a")
    held.add("a", 1_000, response(2), [])
    assert held_bytes(held, "a") < 200


def test_processes_that_share_a_file_see_each_others_responses(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    first, second = StoredResponses(path), StoredResponses(path)
    first.add("a", 1_000, response(1), [{"type": "message", "role": "user", "content": "hi"}])
    assert second.get("resp_1", "a").items[0]["content"] == "hi"
    second.delete("resp_1", "a")
    with pytest.raises(HttpRefusal):
        first.get("resp_1", "a")
