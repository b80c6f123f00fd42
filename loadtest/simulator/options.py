"""The checked options of `mooncake simulate`, and its progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backends.config_pbtxt import KIND_NAMES, OLD_NAMES, convert
from conductor import ConductorConfig
from loadtest.harness.result import Cell, Target
from loadtest.profile.profile import Profile
from loadtest.replay.trace import TraceRow, read_trace
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.profiled import read_profile, settings_of
from loadtest.simulator.runs import Begin, RunsStopped, TraceSource

WHERE = "https://github.com/kvcache-ai/Mooncake, folder FAST25-release/traces"
NODES = 8  # of each kind, in what the paper's figures show
SUFFIXES = (".png", ".svg", ".pdf")

console = Console(stderr=True, highlight=False)


Rows = list[dict[str, Cell]]
Answer = tuple[Rows, list[Target]]  # the result of an experiment


class SimulationRefused(Exception):
    """No run was made; the message names the option to change."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Empty tuples and None: the experiment's default."""

    folder: Path | None = None  # of the traces
    traces: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    admissions: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()
    requests: int | None = None  # the first so many of a trace
    seed: int = 0
    prefills: int | None = None  # workers; None: NODES, or the experiment's number
    decodes: int | None = None
    is_directory: bool = False
    picture: Path | None = None
    changes: tuple[str, ...] = ()  # NAME=VALUE of ConductorConfig, for every run
    frontends: tuple[int, ...] = ()
    notes_latencies_s: tuple[float, ...] = ()
    peer_python: str | None = None  # with Dynamo's wheel, to run its own replay beside ours
    jobs: int = 1  # runs at once, each in its process
    kept: Path | None = None  # folder of finished runs (runs.py)
    profile: Profile | None = None  # of a measured worker, instead of the roofline of a node
    length_scale: float = 1.0  # of the traces' prompts and answers

    def __post_init__(self) -> None:
        if self.picture is not None and self.picture.suffix not in SUFFIXES:
            raise SimulationRefused(f"--plot {self.picture}: the name must end in {SUFFIXES}")

        self.changed(ConductorConfig())  # a wrong option fails before anything runs

    @classmethod
    def typed(cls, kept: str, profile: Path | None, **given: Any) -> SimulationOptions:
        """The values of a command's options; `given` has the other fields by name.

        A repeatable option is a list, or None without a value. SimulationRefused for a profile
        that cannot be read.
        """
        repeatable = {each.name for each in fields(cls) if each.default == ()}
        return cls(
            kept=None if kept == "none" else Path(kept),
            profile=_profile_at(profile),
            **{name: tuple(v or ()) if name in repeatable else v for name, v in given.items()},
        )

    def changed(self, config: ConductorConfig) -> ConductorConfig:
        """The experiment's conductor settings with the user's changes."""
        found: dict[str, object] = {}
        kinds = {each.name: str(each.type) for each in fields(config)}
        for change in self.changes:
            name, equals, text = change.partition("=")
            name = OLD_NAMES.get(name, name)  # as config.pbtxt accepts them
            kind = kinds.get(name)
            if not equals or kind is None:
                raise SimulationRefused(
                    f"--set {change}: write NAME=VALUE with a parameter of the conductor "
                    "(docs/reference/parameters.md)"
                )
            try:
                found[name] = convert(kind, text)
            except ValueError:
                kind = KIND_NAMES.get(kind, kind)
                raise SimulationRefused(f"--set {change}: {text!r} is no {kind}") from None
        made = replace(config, **found)  # type: ignore[arg-type]
        if problems := made.problems():
            raise SimulationRefused("--set: " + "; ".join(problems))
        return made

    def settings(self) -> ClusterSettings:
        shape = ClusterSettings(
            prefills=self.prefills or NODES, decodes=self.decodes or NODES, seed=self.seed
        )
        return shape if self.profile is None else settings_of(self.profile, shape)

    @property
    def is_any_worker(self) -> bool:
        """Not the paper's nodes with the requests as they were recorded."""
        return self.profile is not None or self.length_scale != 1.0

    @property
    def is_shortened(self) -> str:
        """Why the targets for a whole trace and 8 + 8 nodes do not apply; or ""."""
        if self.requests is not None:
            return f"only the first {self.requests} requests were replayed"
        if self.profile is not None:
            return "it was promised of the paper's nodes, not of a profile's workers"
        if self.length_scale != 1.0:
            return f"prompts and answers are {self.length_scale:g} times as long"
        if self.changes:
            return f"it was promised without --set {', '.join(self.changes)}"
        prefills, decodes = self.prefills or NODES, self.decodes or NODES
        if (prefills, decodes) != (NODES, NODES):
            return f"{prefills} + {decodes} nodes, it was promised of {NODES} + {NODES}"
        return ""

    def one_of(self, asked: tuple[str, ...], known: tuple[str, ...], what: str) -> tuple[str, ...]:
        """The selected names, or all; SimulationRefused for an unknown name."""
        if unknown := set(asked) - set(known):
            names = ", ".join(sorted(unknown))
            raise SimulationRefused(f"no {what} {names}; there are {', '.join(known)}")
        return asked or known

    def one_trace(self, default: str) -> str:
        """For an experiment on one trace."""
        if len(self.traces) > 1:
            raise SimulationRefused(f"one --trace at a time, not {', '.join(self.traces)}")
        return self.traces[0] if self.traces else default

    def promised(self, trace: str) -> tuple[str, str]:
        """The trace to run, and why the targets for `trace` do not apply; or ""."""
        asked = self.one_trace(trace)
        why_not = self.is_shortened if asked == trace else f"it was promised of the {trace} trace"
        return asked, why_not

    @property
    def only_changes(self) -> SimulationOptions:
        """The options that decide a run besides its settings."""
        return SimulationOptions(changes=self.changes)

    def source(self, trace: str, is_spread: bool = False) -> TraceSource:
        """The requests of a trace for other processes; TraceError for a wrong file."""
        path, block_tokens = self._path(trace), self.settings().block_tokens
        source = TraceSource.of(path, self.requests, is_spread, block_tokens, self.length_scale)
        source.offered()  # a wrong trace fails before anything runs
        return source

    def rows(self, trace: str) -> list[TraceRow]:
        return read_trace(self._path(trace), self.requests)

    def _path(self, trace: str) -> Path:
        if self.folder is None:
            raise SimulationRefused(
                "no folder of traces: --traces FOLDER, or MOONCAKE_TRACES in the "
                f"environment. They are published at {WHERE}"
            )
        path = self.folder / f"{trace}_trace.jsonl"
        for found in (path, path.with_name(f"{path.name}.gz")):
            if found.is_file():
                return found
        raise SimulationRefused(f"{path} is not there; fetch it from {WHERE}")


def _profile_at(path: Path | None) -> Profile | None:
    if path is None:
        return None
    try:
        return read_profile(path)
    except (OSError, ValueError) as problem:
        raise SimulationRefused(f"--profile {path}: {problem}") from None


NO_OPTIONS = SimulationOptions()


@contextmanager
def reasons_shown(what: str, *refusals: type[Exception]) -> Iterator[None]:
    """Print why a command ended early, and exit with the status of that reason."""
    try:
        yield
    except refusals as problem:
        console.print(f"cannot {what}: {problem}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except RunsStopped as stopped:
        console.print(f"stopped: {stopped}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None


@contextmanager
def progress_bar() -> Iterator[Begin]:
    """Yields a function that begins a line of `steps` steps and returns the counter of a step."""
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:

        def begin(name: str, steps: int) -> Callable[[], None]:
            task = progress.add_task(name, total=steps)
            return lambda: progress.advance(task)

        yield begin
