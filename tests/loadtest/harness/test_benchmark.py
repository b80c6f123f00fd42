"""What benchmarks share: turns, counters, the shape of the answer, processes, judging of rows."""

from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path

import psutil
import pytest
import typer
from rich.console import Console

from bench.harness.processes import BenchStore, PeerProcess
from bench.reuse import targets
from loadtest.client.server import Addresses, addresses_of
from loadtest.harness import server
from loadtest.harness.benchmark import benchmark, in_turns, moved, settled
from loadtest.harness.result import Result, Target, shown
from loadtest.harness.server import CannotMeasure, ServerFailed


def test_a_result_ends_with_one_line_of_json_in_the_common_shape() -> None:
    file = io.StringIO()
    result = Result(
        "demo",
        1.23456,
        [{"step": "cold", "ms": 12.0}, {"step": "hit", "ms": None, "ok": True}],
        [Target("ratio", 0.25, "<=", 0.35), Target("rate", None, ">=", 9.0, "no second node")],
    )
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


def test_rows_that_have_nothing_in_common_stand_in_tables_of_their_own() -> None:
    console = Console(file=io.StringIO(), width=60)
    rows = [{"way": "store", "rate": 1}, {"what": "kill", "seconds": 2}, {"what": "cut", "lost": 0}]
    Result("b", 0.0, rows, []).print(console)
    heads = [line.split("┃") for line in console.file.getvalue().splitlines() if "┃" in line]  # type: ignore[attr-defined]
    assert [[cell.strip() for cell in head[1:-1]] for head in heads] == [
        ["way", "rate"],
        ["what", "seconds", "lost"],
    ]


def test_a_benchmark_prints_its_result_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with benchmark("demo") as run:
        run.rows.append({"step": "cold"})
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["name"], found["rows"], found["targets"]) == ("demo", [{"step": "cold"}], [])


def test_what_was_found_before_something_kept_from_measuring_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as exited, benchmark("demo") as run:
        run.rows.append({"step": "cold"})
        raise CannotMeasure("too busy")
    assert exited.value.exit_code == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rows"] == [{"step": "cold"}]
    assert found["shortened"] == "cannot measure the rest: too busy"
    with pytest.raises(typer.Exit), benchmark("demo"):
        raise CannotMeasure("too busy from the beginning")
    assert capsys.readouterr().out == ""


def test_what_keeps_from_measuring_ends_with_status_1_and_no_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended, benchmark("demo"):
        raise ServerFailed("it is not ready")
    assert ended.value.exit_code == 1
    said = capsys.readouterr()
    assert said.out == "" and "cannot measure: it is not ready" in said.err


def test_ways_take_turns_and_warm_rounds_are_thrown_away() -> None:
    calls: list[str] = []

    def way(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = in_turns({"a": lambda: way("a"), "b": lambda: way("b")}, rounds=2, warm_rounds=1)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_a_batch_is_shown_in_microseconds_and_in_gb_per_s() -> None:
    assert moved(10**6, 16, 0.002) == {
        "block_bytes": 10**6,
        "blocks": 16,
        "microseconds": 2_000.0,
        "gb_per_s": 8.0,
    }


def test_a_counter_is_read_until_it_has_stopped() -> None:
    values = iter([1, 2, 5, 5, 9])
    assert settled(lambda: next(values), poll_s=0.0, wait_s_max=60.0) == 5
    assert next(values) == 9


def test_a_script_in_another_python_is_asked_and_its_last_words_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "print('noise')\n"
        "print(json.dumps({'argument': sys.argv[1]}), flush=True)\n"
        "print(json.dumps({'asked': sys.stdin.readline()}), flush=True)\n"
        "raise SystemExit('it was the wheel')\n"
    )
    with ExitStack() as stack:
        peer = PeerProcess(stack, Path(sys.executable), script, "load.json")
        assert peer.answer() == {"argument": "load.json"}
        assert peer.ask("round") == {"asked": "round\n"}
        with pytest.raises(RuntimeError, match=r"(?s)peer does not run here: .*the wheel"):
            peer.answer()


@pytest.mark.servers
def test_a_process_of_the_store_that_does_not_start_says_why() -> None:
    with ExitStack() as stack:
        with pytest.raises(RuntimeError, match=r"(?s)directory did not start: .*no-such-policy"):
            BenchStore(stack, "--eviction", "no-such-policy")
        store = BenchStore(stack)
    assert not psutil.pid_exists(store.directory.pid), "it ends with the stack"


@pytest.mark.parametrize(
    ("value", "op", "met"), [(0.3, "<=", True), (0.4, "<=", False), (0.35, ">=", True)]
)
def test_a_target_knows_whether_it_is_met(value: float, op: str, met: bool) -> None:
    assert Target("t", value, op, 0.35).is_met is met


def test_a_missing_value_needs_a_reason_and_infinity_is_no_value() -> None:
    with pytest.raises(AssertionError, match="needs a reason"):
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


def test_ports_chosen_for_servers_that_start_later_are_chosen_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "PORT_MAX", server.PORT_MIN + 200)
    first = server.own_ports(20)  # nobody listens there yet
    found = [server.free_addresses() for _ in range(20)]
    ports = [int(address.rpartition(":")[2]) for each in found for address in astuple(each)]
    assert len(set(ports + first)) == 80


def reuse_rows(**changes: object) -> list[dict]:
    """Five prompts: cold 100 ms, cached 20 ms, fetched 30 ms; `changes` go to the fetched ones."""
    rows = []
    for prompt in range(5):
        for step, ms, cached, nixl_bytes in (
            ("cold", 100.0, 0, 0),
            ("cached", 20.0, 4_095, 0),
            ("fetched", 30.0, 4_095, 10**6),
        ):
            row = {
                "prompt": prompt,
                "step": step,
                "ttft_ms": ms + prompt,
                "cached_tokens": cached,
                "fetched_bytes": nixl_bytes,
                "nixl_bytes": float(nixl_bytes),
            }
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
