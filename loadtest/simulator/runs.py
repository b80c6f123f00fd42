"""Running the runs of an experiment, in processes, and keeping their results.

A run is a function of a trace and of settings only, so runs are independent. They are made one
after the other, or in N processes with `--jobs N`. Each result is kept in a file whose name is a
digest of the requests, the settings and the code (`DECIDING`). An experiment that was stopped
resumes from there. A change of targets or pictures alone repeats no run.

Not here: which runs an experiment needs (experiments/), a run itself (cluster/).
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import platform
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from loadtest.replay.trace import TRACE_BLOCK_TOKENS, read_trace
from loadtest.simulator.cluster.job import Offered, offered_of, spread_ticks

ROOT = Path(__file__).resolve().parents[2]
# Source files and folders that decide the result of a run. The module of the function that makes
# the run counts too.
DECIDING = (
    "loadtest/simulator/cluster",
    "loadtest/simulator/block_cache.py",
    "loadtest/replay/trace.py",
    "loadtest/replay/datasets.py",
    "loadtest/simulator/recorded_run.py",
    "loadtest/results",
    "loadtest/profile/profile.py",
    "conductor",
    "mooncake_store/directory/core",
    "mooncake_store/prefix_index",
    "mooncake_store/records",
    "mooncake_store/layout.py",
    "mooncake_store/block_keys.py",
    "mooncake_store/native",
    "mooncake_store/errors.py",
    "backends/engine/batching",
    "backends/workers/prefix_loading.py",
    "backends/workers/step_times.py",
    "backends/frontend/routing_notes.py",
    "backends/frontend/lifecycle/attempts.py",
    # The baselines of the papers' experiments; only a clone of the repository has them.
    "bench/paper/coupled.py",
    "bench/paper/figures/served.py",
)
KEPT_MAX = 4_096  # runs in one folder; the oldest are deleted first
SUFFIX = ".run"

Came = TypeVar("Came")
Quiet = Callable[[], None]
Begin = Callable[[str, int], Quiet]


class RunsStopped(Exception):
    """Ctrl-C. Finished runs are kept if there is a folder."""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where the requests of a run come from; cheap to send to another process."""

    path: Path = field(repr=False)
    requests: int | None = None  # only the first so many; None: all
    is_spread: bool = False  # evenly over the ticks of the recording
    digest: str = ""  # of the file
    block_tokens: int = TRACE_BLOCK_TOKENS  # of the engine
    length_scale: float = 1.0

    @classmethod
    def of(
        cls,
        path: Path,
        requests: int | None = None,
        is_spread: bool = False,
        block_tokens: int = TRACE_BLOCK_TOKENS,
        length_scale: float = 1.0,
    ) -> TraceSource:
        digest = blake2b(path.read_bytes(), digest_size=16).hexdigest()
        return cls(path, requests, is_spread, digest, block_tokens, length_scale)

    def offered(self) -> list[Offered]:
        """The requests, made once per process for all runs."""
        return _offered(self)


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """For a run that makes its requests itself, from its arguments."""

    def offered(self) -> list[Offered]:
        return []


@lru_cache(maxsize=4)
def _offered(source: TraceSource) -> list[Offered]:
    rows = read_trace(source.path, source.requests)
    rows = spread_ticks(rows) if source.is_spread else rows
    return offered_of(rows, source.block_tokens, source.length_scale)


@dataclass(frozen=True, slots=True)
class PlannedRun(Generic[Came]):
    """`make(offered, *arguments, on_over=...)` is a function of a module; `name` is for display."""

    name: str
    source: TraceSource | OwnRequests
    make: Callable[..., Came]
    arguments: tuple[Any, ...] = ()

    def key(self) -> str:
        """The digest of all that decides the run; settings count by their repr."""
        shown = repr((self.make.__module__, self.make.__qualname__, self.source, self.arguments))
        assert " at 0x" not in shown, f"a setting of {self.name} has no name: {shown}"
        code = code_digest(self.make.__module__, inspect.getsourcefile(self.make) or "")
        return blake2b(f"{code} {shown}".encode(), digest_size=16).hexdigest()

    def run(self, on_over: Quiet = lambda: None) -> Came:
        return self.make(self.source.offered(), *self.arguments, on_over=on_over)


@cache
def code_digest(module: str, file: str) -> str:
    """Digest of the deciding code, of an experiment's module and of the numeric libraries."""
    digest = blake2b(f"{platform.python_version()} {np.__version__} {module}".encode())
    for name in (*DECIDING, file):
        path = ROOT / name
        found = [*path.rglob("*.py"), *path.rglob("*.c")] if path.is_dir() else [path]
        found = [source for source in found if source.is_file()]
        for source in sorted(found):
            digest.update(source.relative_to(ROOT).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()


class KeptRuns:
    """The results of runs, one file for each. Files are pickles: use only a folder of your own."""

    def __init__(self, folder: Path | None) -> None:
        """None: nothing is kept."""
        self._folder = folder

    def get(self, planned: PlannedRun[Came]) -> Came | None:
        """The result of a run; None when it is not kept, or its file is damaged."""
        if self._folder is None:
            return None
        try:
            found: Came = pickle.loads((self._folder / (planned.key() + SUFFIX)).read_bytes())
        except Exception:  # a partial or foreign file: the run is made again
            return None
        return found

    def put(self, planned: PlannedRun[Came], came: Came) -> None:
        """Write the file atomically: write a temporary file, then rename it."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
            file.write(pickle.dumps(came))
        os.replace(file.name, self._folder / (planned.key() + SUFFIX))
        kept = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-KEPT_MAX]:
            path.unlink(missing_ok=True)


def run_all(
    planned: Sequence[PlannedRun[Came]], begin: Begin, jobs: int = 1, folder: Path | None = None
) -> list[Came]:
    """The result of each run, in this order. RunsStopped after Ctrl-C."""
    kept = KeptRuns(folder)
    came = {number: kept.get(one) for number, one in enumerate(planned)}
    known = {number: found for number, found in came.items() if found is not None}
    missing = {number: one for number, one in enumerate(planned) if number not in known}
    try:
        if jobs == 1 or len(missing) < 2:
            for number, one in missing.items():
                known[number] = one.run(begin(one.name, len(one.source.offered())))
                kept.put(one, known[number])
        else:
            _in_processes(missing, known, begin, min(jobs, len(missing)), kept)
    except KeyboardInterrupt:
        where = f" and kept in {folder}: the same command goes on from there" if folder else ""
        raise RunsStopped(f"{len(known)} of {len(planned)} runs were made{where}") from None
    return [known[number] for number in range(len(planned))]


def _in_processes(
    missing: Mapping[int, PlannedRun[Came]],
    known: dict[int, Came],
    begin: Begin,
    jobs: int,
    kept: KeptRuns,
) -> None:
    """Fresh processes: a forked one would inherit locks of threads, such as the progress bar's."""
    done = begin(f"runs, {jobs} at a time", len(missing))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=_leave_interrupts)
    try:
        numbers = {pool.submit(_run, one): number for number, one in missing.items()}
        for ended in as_completed(numbers):
            number = numbers[ended]
            known[number] = ended.result()
            kept.put(missing[number], known[number])
            done()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    pool.shutdown()


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; only the parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(planned: PlannedRun[Came]) -> Came:
    return planned.run()
