"""Twenty seconds of faults on a whole fleet; see `make chaos-serve` for ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.fleet import why_no_namespaces
from tests.chaos_serve.__main__ import run
from tests.chaos_serve.verdict import shown


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(360)
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_a_fleet_under_attack_keeps_its_promises(seed: int, tmp_path: Path) -> None:
    report = run(20.0, seed, tmp_path)
    print(shown(report))
    assert not report.broken, "\n".join(report.broken)
    assert report.requests >= 10, "no load"
    assert sum(counts["faults"] for counts in report.by_kind.values()) >= 2, "no fault"
