"""Runs in processes, kept by what decides them, and stopped half-way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.paper.experiments import scheduling
from loadtest.simulator import runs
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.runs import PlannedRun, RunsStopped, TraceSource, run_all
from tests.loadtest.simulator.fleets import START

# What moves bytes, and is imported beside what decides: no run calls any of it.
BESIDE = (
    "mooncake_store/client",
    "mooncake_store/directory/boot_clock.py",
    "mooncake_store/directory/client.py",
    "mooncake_store/keys",
    "mooncake_store/memory",
    "mooncake_store/process",
    "mooncake_store/transports",
    "mooncake_store/wire",
    "backends/errors.py",
    "backends/launch_secret.py",
    "backends/tensors.py",
    "backends/token_logprobs.py",
    "backends/engine/sampling_params.py",
    "backends/workers/arrivals.py",
    "backends/workers/kv_loader.py",
    "backends/workers/protocol.py",
)
SMALL = ClusterSettings(prefills=2, decodes=2)


@pytest.fixture
def source() -> TraceSource:
    return TraceSource.of(START, requests=20)


def counted(offered: Sequence[Offered], factor: int, on_over: Callable[[], None]) -> int:
    """A run that says how many requests it was given."""
    for _ in offered:
        on_over()
    return factor * len(offered)


def interrupted(offered: Sequence[Offered], on_over: Callable[[], None]) -> int:
    raise KeyboardInterrupt


def quiet(name: str, steps: int) -> Callable[[], None]:
    return lambda: None


def begun_in(names: list[str]) -> runs.Begin:
    """Notes which runs are made."""

    def begin(name: str, steps: int) -> Callable[[], None]:
        names.append(name)
        return lambda: None

    return begin


@pytest.mark.slow
def test_runs_in_processes_come_to_the_same_in_the_same_order(source: TraceSource) -> None:
    planned = [
        PlannedRun(f"{policy} {speed}", source, scheduling.run, (policy, speed, SMALL))
        for policy in ("random", "adaptive")
        for speed in (1.0, 2.0)
    ]
    alone = run_all(planned, quiet)
    assert run_all(planned, quiet, jobs=2) == alone
    assert [(run.policy, run.speed) for run in alone] == [
        ("random", 1.0),
        ("random", 2.0),
        ("adaptive", 1.0),
        ("adaptive", 2.0),
    ]


def test_what_is_kept_is_not_made_again(source: TraceSource, tmp_path: Path) -> None:
    made: list[str] = []
    planned = [PlannedRun(f"x{n}", source, counted, (n,)) for n in range(3)]
    assert run_all(planned[:2], begun_in(made), folder=tmp_path) == [0, 20]
    assert run_all(planned, begun_in(made), folder=tmp_path) == [0, 20, 40]
    assert made == ["x0", "x1", "x2"]


def test_a_damaged_file_is_a_run_that_is_not_known(source: TraceSource, tmp_path: Path) -> None:
    made: list[str] = []
    planned = [PlannedRun("x", source, counted, (1,))]
    run_all(planned, begun_in(made), folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert run_all(planned, begun_in(made), folder=tmp_path) == [20]
    assert made == ["x", "x"]


def test_all_that_decides_a_run_is_in_its_key(
    source: TraceSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = PlannedRun("x", source, scheduling.run, ("random", 1.0, SMALL))
    longer = tmp_path / "trace.jsonl"
    longer.write_text(START.read_text() + START.read_text())
    others = [
        replace(planned, arguments=("random", 1.0, replace(SMALL, seed=1))),
        replace(planned, source=replace(source, requests=19)),
        replace(planned, source=replace(source, is_spread=True)),
        replace(planned, source=TraceSource.of(longer, requests=20)),
        replace(planned, make=counted),
    ]
    keys = {one.key() for one in (planned, *others)}
    assert len(keys) == len(others) + 1
    assert replace(planned, name="y").key() == planned.key()
    monkeypatch.setattr(runs, "DECIDING", runs.DECIDING[1:])
    runs.code_digest.cache_clear()
    assert planned.key() not in keys
    runs.code_digest.cache_clear()


def test_after_ctrl_c_what_was_finished_is_kept(source: TraceSource, tmp_path: Path) -> None:
    done = PlannedRun("done", source, counted, (1,))
    with pytest.raises(RunsStopped, match="1 of 2 runs were made and kept in"):
        run_all([done, PlannedRun("stopped", source, interrupted)], quiet, folder=tmp_path)
    made: list[str] = []
    run_all([done], begun_in(made), folder=tmp_path)
    assert not made


def test_the_oldest_runs_go_first(
    source: TraceSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "KEPT_MAX", 2)
    run_all([PlannedRun(f"x{n}", source, counted, (n,)) for n in range(4)], quiet, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_code_that_decides_is_all_that_a_cluster_imports() -> None:
    """A module that a run uses and no key knows would let an old result stand for a new one."""
    program = (
        "import sys, loadtest.simulator.cluster.fleet, bench.paper.coupled"
        ", loadtest.simulator.recorded_run, loadtest.results.digest\n"
        "for name, module in sorted(sys.modules.items()):\n"
        "    file = getattr(module, '__file__', None) or ''\n"
        "    if name.partition('.')[0] in ('backends', 'bench', 'conductor', 'loadtest',"
        " 'mooncake_store')"
        " and not file.endswith('__init__.py'): print(file)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=runs.ROOT, check=True, capture_output=True, text=True
    )
    decide = [runs.ROOT / name for name in (*runs.DECIDING, *BESIDE)]
    files = [Path(line) for line in said.stdout.splitlines()]
    assert len(files) > 40, files
    forgotten = [
        file
        for file in files
        if not any(file == known or known in file.parents for known in decide)
    ]
    assert not forgotten
