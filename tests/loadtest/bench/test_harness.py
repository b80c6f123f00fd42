"""What benchmarks share: the shape of the answer, counters, and the judging of rows."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from loadtest.bench.result import Result, Target, shown
from loadtest.bench.reuse import targets
from loadtest.bench.server import free_addresses
from loadtest.client.server import Addresses, addresses_of


def test_a_result_ends_with_one_line_of_json_in_the_common_shape() -> None:
    file = io.StringIO()
    result = Result(
        "demo", 1.23456,
        [{"step": "cold", "ms": 12.0}, {"step": "hit", "ms": None, "ok": True}],
        [Target("ratio", 0.25, "<=", 0.35), Target("rate", None, ">=", 9.0, "no second node")],
    )  # fmt: skip
    result.print(Console(file=file, width=100))
    assert json.loads(file.getvalue().splitlines()[-1]) == {
        "name": "demo",
        "seconds": 1.235,
        "rows": [{"step": "cold", "ms": 12.0}, {"step": "hit", "ms": None, "ok": True}],
        "targets": [
            {"name": "ratio", "value": 0.25, "op": "<=", "goal": 0.35},
            {"name": "rate", "value": None, "op": ">=", "goal": 9.0, "why": "no second node"},
        ],
    }
    assert "not measured" in file.getvalue()


@pytest.mark.parametrize(
    ("value", "op", "met"), [(0.3, "<=", True), (0.4, "<=", False), (0.35, ">=", True)]
)
def test_a_target_knows_whether_it_is_met(value: float, op: str, met: bool) -> None:
    assert Target("t", value, op, 0.35).is_met is met


def test_a_missing_value_needs_a_reason_and_infinity_is_no_value() -> None:
    with pytest.raises(AssertionError, match="say why"):
        Target("t", None, "<=", 1.0)
    with pytest.raises(AssertionError, match="t is inf"):
        Target("t", float("inf"), "<=", 1.0)


def test_cells_are_shown_as_people_read_them() -> None:
    cells = (None, True, "a", 0.123456, 1_234_567, 1_234.5)
    assert list(map(shown, cells)) == ["-", "True", "a", "0.1235", "1,234,567", "1,234"]


def test_the_other_ports_follow_from_the_grpc_port() -> None:
    found = addresses_of("10.0.0.1:8001")
    assert found == Addresses("10.0.0.1:8001", "10.0.0.1:8000", "10.0.0.1:8002")
    with pytest.raises(ValueError, match="is not a gRPC address"):
        addresses_of("localhost")


def test_free_addresses_are_three_different_ports() -> None:
    found = free_addresses()
    assert len({found.grpc, found.http, found.metrics}) == 3


def reuse_rows(**changes: object) -> list[dict]:
    """Five prompts: cold 100 ms, cached 20 ms, fetched 30 ms; `changes` go to the fetched ones."""
    rows = []
    for prompt in range(5):
        for step, ms, cached, moved in (
            ("cold", 100.0, 0, 0), ("cached", 20.0, 4_095, 0), ("fetched", 30.0, 4_095, 10**6),
        ):  # fmt: skip
            row = {"prompt": prompt, "step": step, "ttft_ms": ms + prompt, "cached_tokens": cached,
                   "fetched_bytes": moved, "nixl_bytes": float(moved)}  # fmt: skip
            rows.append(row | (changes if step == "fetched" else {}))
    return rows


def test_the_reuse_targets_are_ratios_of_medians() -> None:
    cached, fetched = targets(reuse_rows())
    assert cached.value == pytest.approx(22 / 102) and fetched.value == pytest.approx(32 / 102)
    assert cached.is_met and fetched.is_met


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cached_tokens": 0}, "not every fetched prompt was found"),
        ({"nixl_bytes": 0.0, "fetched_bytes": 0}, "did not rise"),
        ({"nixl_bytes": None, "fetched_bytes": None}, "did not rise"),
    ],
)
def test_a_fetch_that_was_none_has_no_value_and_says_why(changes: dict, why: str) -> None:
    cached, fetched = targets(reuse_rows(**changes))
    assert cached.value is not None
    assert fetched.value is None and why in fetched.why
