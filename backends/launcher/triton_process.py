"""One tritonserver of `mooncake serve`: its part of the repository, ports, log, start and death.

The models that clients call share one Triton, the *frontend's*, on the public ports. Each prefill
and decode worker has a Triton of its own, so that a hung, aborted or killed worker process affects
no other model (docs/decisions/0017). On a single machine, a worker's Triton listens on loopback. In
a deployment, it listens at the host's address, so that frontends of other hosts can call it.

Each model runs in a process of its own (Triton's Python *stub*), a child of tritonserver. `Stubs`
finds these processes, because Triton reports a model as ready even after its stub has died.

Not here: which Tritons a host has (launch.py), reading Triton's log (repository.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from backends.launcher.environment import PORT_MAX, PORT_MIN, free_ports
from backends.launcher.repository import (
    ModelLoad,
    ModelState,
    RepositoryMirror,
    TritonLog,
    WorkerFolders,
    ready_by_grpc,
    ready_by_http,
)
from mooncake_store.process.bounded_log import LOG_BYTES_MAX
from mooncake_store.process.child_processes import (
    ChildProcess,
    Command,
    GrowingPauses,
    LimitedRestarts,
    RestartPolicy,
)

STUB = "triton_python_backend_stub"


class Stubs:
    """Finds the stub processes of all Tritons with one scan of /proc. A process that is not a child
    of a Triton is inspected once, and skipped in later scans."""

    def __init__(self) -> None:
        self._strangers: set[str] = set()  # pids of live processes that are not a Triton's children

    def models_alive(self, triton_pids: Collection[int]) -> dict[int, set[str]]:
        """Pid of each tritonserver -> names of its models that have a live process."""
        found: dict[int, set[str]] = {pid: set() for pid in triton_pids}
        pids = set(filter(str.isdigit, os.listdir("/proc")))
        self._strangers &= pids  # the kernel may reuse the pid of a process that ended
        for pid in pids - self._strangers:
            with contextlib.suppress(OSError):  # the process ended during the scan
                stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
                state, parent = stat.rpartition(") ")[2].split()[:2]
                if int(parent) not in found:
                    self._strangers.add(pid)
                elif state != "Z" and (arguments := _stub_arguments(pid)):
                    found[int(parent)].add(Path(arguments[1]).parents[1].name)
        return found


def end_orphans(launches: Collection[str]) -> None:
    """Kill the stubs of dead launches, because a stub whose Triton is killed during a load can wait
    for ever. `launches`: names of the dead launches. The name of each shared-memory region of a
    launch begins with the launch's name and `-`."""
    prefixes = tuple(f"{name}-" for name in launches)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if any(argument.startswith(prefixes) for argument in _stub_arguments(pid)):
                os.kill(int(pid), signal.SIGKILL)


def _stub_arguments(pid: str) -> list[str]:
    """The command line of a process if it is a stub; [] if not."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "surrogateescape").split("\0")
    is_stub = len(arguments) > 1 and Path(arguments[0]).name == STUB
    return arguments if is_stub else []


FRONTEND = "frontend"
LOOPBACK = "127.0.0.1"
CRASHES_MAX = 2  # number of restarts of a Triton that crashes before its first readiness
PROMISED: dict[str, list[int]] = {}  # process name -> ports of its newest incarnation
INCARNATIONS = itertools.count(1)  # numbers the incarnations of all Tritons of this launcher
NUMBERS = itertools.count(1)  # numbers the Tritons; a restarted Triton keeps its number
DRAIN_S_MAX = 45.0  # limit in seconds of a drain; a worker ends its requests after at most 30 s
END_S_MAX = 5.0  # seconds from SIGTERM to SIGKILL
# Longest time between two log lines: the worker's "serving", then Triton's load or refusal of the
# model. Usually this takes milliseconds. Triton 2.51 waits for ever for a stub that paused during
# the load. In that case the directory lists the worker, but every call to the worker fails.
LOAD_PENDING_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of one incarnation (process) of a Triton, each HOST:PORT; "" if it is disabled."""

    grpc: str
    metrics: str = ""
    http: str = ""
    called_grpc: str = ""  # address to which callers connect; "" if that is `grpc`

    @property
    def called(self) -> str:
        return self.called_grpc or self.grpc


@dataclass(frozen=True, slots=True)
class Restart:
    """The restart of a process or model that died."""

    name: str
    pause_s: float = 0.0  # seconds until the start; > 0 if the process died several times

    @property
    def text(self) -> str:
        when = f" in {self.pause_s:.0f} s" if self.pause_s else ""
        return f"{self.name} died, starting it again{when}"


def promised_ports() -> set[int]:
    return {port for each in PROMISED.values() for port in each}


def restarts_of(children: Iterable[ChildProcess]) -> list[Restart]:
    """Supervise child processes. Return those that died and are started again."""
    pauses = ((child.name, child.supervise()) for child in children)
    return [Restart(name, pause_s) for name, pause_s in pauses if pause_s is not None]


@dataclass(frozen=True, slots=True)
class TritonSetup:
    """Settings that all Tritons of a launch share."""

    repository: Path  # the operator's model repository
    mirrors: Path  # folder with a mirror of the repository for each Triton
    log_dir: Path
    cwd: Path
    command_of: Callable[[Triton, Endpoints], Command]  # the command of the next incarnation
    # The next three fields are for Tritons without planned addresses.
    listen: str = LOOPBACK  # address to bind
    called: str = LOOPBACK  # address to which callers connect
    ports: tuple[int, int] = (PORT_MIN, PORT_MAX)  # (lowest port, highest port + 1)
    log_bytes_max: int = LOG_BYTES_MAX
    # Renders each worker's config.pbtxt in the mirror. None: the mirror copies it unchanged.
    folders: WorkerFolders | None = None


class Triton:
    """The frontend's Triton, and the base class of a worker's Triton."""

    make_policy: Callable[[], RestartPolicy] = LimitedRestarts

    def __init__(
        self, name: str, setup: TritonSetup, fixed: Endpoints | None, wants: Callable[[str], bool]
    ) -> None:
        """Does not start the process. `fixed`: the planned addresses, or None if each start chooses
        a free gRPC port from `setup.ports`. The metrics service always gets a free port of
        loopback. `wants(model)` is True if this Triton serves the model."""
        self.name = name
        self.number = next(NUMBERS)
        self._setup, self._fixed = setup, fixed
        self.mirror = RepositoryMirror(setup.repository, setup.mirrors / name, wants, setup.folders)
        self.log_path = setup.log_dir / f"{name}.log"
        self._log = TritonLog(self.log_path)
        self._command_of = setup.command_of
        self.endpoints: Endpoints | None = None  # addresses of the newest incarnation
        self.incarnation = 0  # number of the newest incarnation; 0 before the first start
        self.child: ChildProcess | None = None
        self._starts = 0  # value of `child.starts` at the last call of `_began`
        self._crashes = 0  # crashes before the first readiness; 0 <= _crashes <= CRASHES_MAX
        self._loaded: set[str] = set()  # models that the newest incarnation loaded
        self._with_process: set[str] = set()  # models that had a process at the last `supervise`
        self._loads: list[ModelLoad] = []

    def start(self) -> None:
        self.child = ChildProcess(
            self.name,
            self._command,
            self.log_path,
            self._setup.cwd,
            self.make_policy(),
            self._setup.log_bytes_max,
        )
        self._began()

    def _start_again(self, child: ChildProcess) -> None:
        child.start_again()
        self._began()

    def _began(self) -> None:
        """Reset the state of the previous incarnation."""
        assert self.child is not None
        self._starts = self.child.starts
        self._with_process.clear()
        self._loaded.clear()

    def _command(self) -> Command:
        promised = promised_ports()
        [port] = free_ports(1, promised)
        metrics = f"{LOOPBACK}:{port}"
        if self._fixed:
            self.endpoints = replace(self._fixed, metrics=metrics)
        else:
            setup = self._setup
            [grpc] = free_ports(1, {*promised, port}, *setup.ports, setup.listen)
            called = f"{setup.called}:{grpc}"
            self.endpoints = Endpoints(f"{setup.listen}:{grpc}", metrics, called_grpc=called)
        PROMISED[self.name] = [port, int(self.endpoints.grpc.rpartition(":")[2])]
        self._read_log()
        self._log.service_problem = ""
        self._log.is_load_pending = False
        self.incarnation = next(INCARNATIONS)
        return self._command_of(self, self.endpoints)

    @property
    def pid(self) -> int | None:
        """The process id; None while the process does not run."""
        return self.child.pid if self.child is not None and self.child.is_alive else None

    def supervise(self, alive: set[str]) -> list[Restart]:
        """Copy repository edits to the mirror; restart dead processes. `alive`: live models."""
        self.mirror.sync()
        if self.child is None:
            return []
        restarts = [Restart(model) for model in self._died(alive)]
        self._log.moved(self.child.bound_log())  # `_died` must read the log before
        if self.child.is_alive and self.service_problem():
            self.child.kill()  # a port is taken; only unplanned ports change with a restart
        pause_s = self.child.supervise()
        if pause_s is not None:
            restarts.append(Restart(self.name, pause_s))
        if self.child.starts != self._starts:
            self._began()
        return restarts

    def _died(self, alive: set[str]) -> list[str]:
        """Revive models whose process died. Return those that Triton reloads without a restart."""
        self._read_log()
        # Each failed attempt to load a model starts and ends a process. Only a model that was
        # loaded and has no process any more has died.
        died = (self._with_process & self.mirror.models() & self._loaded) - alive
        self._with_process = set(alive)
        return [model for model in sorted(died) if self._revive(model)]

    def _revive(self, model: str) -> bool:
        if 'backend: "conductor"' in self.mirror.config(model) and self.child is not None:
            # If only the model restarted, Triton might abort, and clients of open streams would
            # wait for ever. The end of the Triton fails their requests at once.
            self.child.kill()
            return False
        self.mirror.revive(model)
        return True

    def service_problem(self) -> str:
        """The reason why this incarnation lacks one of its ports; "" if it has all of them."""
        self._read_log()
        return self._log.service_problem

    def supervise_start(self) -> str:
        """One step of supervision; called repeatedly until Triton is ready for the first time.
        Returns the reason why Triton cannot start, or "".

        If an unplanned port is taken, Triton is restarted with another port. A crashed Triton is
        restarted up to CRASHES_MAX times, because Triton 2.51 sometimes aborts on a busy machine
        while it creates shared memory. Raises ChildDied if Triton exited by itself, or crashed more
        than CRASHES_MAX times.
        """
        if self.child is None:
            self.mirror.sync()
            return ""
        problem = self.service_problem()
        if problem and (self._fixed is None or "Metrics" in problem):
            self._start_again(self.child)
            return ""
        if self.child.has_crashed and self._crashes < CRASHES_MAX:
            self._crashes += 1
            self._start_again(self.child)
        elif not problem:
            self.child.check_alive()
        return problem

    def take_loads(self) -> list[ModelLoad]:
        """Loads of models, and loads that Triton or the mirror refused, since the last call."""
        self._read_log()
        loads, self._loads = self._loads, []
        return [*loads, *self.mirror.take_refusals()]

    def _read_log(self) -> None:
        if self.child is None:
            return  # the log file may be that of an earlier launch
        for load in self._log.news():
            self.mirror.edits.loaded(load)
            if not load.reason:
                self._loaded.add(load.model)
            self._loads.append(replace(load, is_new=load.model not in self._loaded))

    def states(self) -> list[ModelState] | None:
        """The state of each model. None until Triton answers. It answers after it has tried once to
        load each model. Any thread may call this."""
        endpoints = self.endpoints
        if endpoints is None:
            return None
        found = []
        for model in sorted(self.mirror.models()):
            if endpoints.http:
                is_ready = ready_by_http(endpoints.http, model)
            else:
                is_ready = ready_by_grpc(endpoints.called, model)
            if is_ready is None:
                return None
            found.append(ModelState(model, is_ready))
        return found


class WorkerTriton(Triton):
    """A worker's Triton. It starts once the worker is in the mirror, and ends after a drain."""

    make_policy = GrowingPauses

    def __init__(self, worker: str, setup: TritonSetup, fixed: Endpoints | None = None) -> None:
        super().__init__(worker, setup, fixed, self._wants)
        self._draining_from_s: float | None = None
        self._ending_from_s: float | None = None
        self._load_pending_from_s: float | None = None

    def _wants(self, model: str) -> bool:
        return model == self.name and self._draining_from_s is None

    def supervise(self, alive: set[str]) -> list[Restart]:
        if self._draining_from_s is not None:
            self.mirror.sync()
            return []
        self._end_stuck_load(time.monotonic())
        restarts = super().supervise(alive)
        if self.child is None and self.mirror.models():
            self.start()
        return restarts

    def _end_stuck_load(self, now_s: float) -> None:
        if self.child is None or not self._log.is_load_pending:
            self._load_pending_from_s = None
        elif self._load_pending_from_s is None:
            self._load_pending_from_s = now_s
        elif now_s - self._load_pending_from_s > LOAD_PENDING_S_MAX:
            self._load_pending_from_s = None
            self.child.kill()

    def _revive(self, model: str) -> bool:
        """Kill this Triton, because it serves no other model. `supervise` then restarts it."""
        assert self.child is not None
        self.child.kill()
        return False

    def drain(self, alive: set[str]) -> bool:
        """Drain for at most DRAIN_S_MAX, then end Triton. To be called until it returns True."""
        now_s = time.monotonic()
        if self._draining_from_s is None:
            self._draining_from_s = now_s
        self.mirror.sync()  # removes the model, so its process ends after the last request
        if self.child is None:
            return True
        if not self.child.is_alive:
            self.child.kill()  # kills the stubs that are left in Triton's process group
            return True
        if self._ending_from_s is None:
            if alive and now_s - self._draining_from_s < DRAIN_S_MAX:
                return False
            self._ending_from_s = now_s
            self.child.terminate()
        if now_s - self._ending_from_s > END_S_MAX:
            self.child.kill()
        return False


def all_states(answers: Iterable[tuple[Triton, list[ModelState] | None]]) -> list[ModelState]:
    """All models by name. Models of a Triton that does not answer are not ready."""
    found = []
    for triton, answer in answers:
        found += answer or [ModelState(model, False) for model in triton.mirror.models()]
    return sorted(found, key=lambda state: state.name)
