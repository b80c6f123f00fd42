"""One tritonserver of `mooncake serve`: its part of the repository, ports, log, start and death.

The models that clients call share one, the *frontend's*, on the public ports. Each prefill and
decode worker has one of its own, on loopback or, where a deployment has several hosts, where their
frontends call it; so a process of it that is frozen, aborted or killed takes nobody along
(docs/decisions/0017).

Each model instance runs in a process of its own (Triton's Python stub), a child of tritonserver.
That one died is noticed here (`Stubs`, `StubWatch`), because Triton does not notice: it reports the
model as ready. Not here: which Tritons there are (launch.py), child processes (processes.py),
reading Triton's log (repository.py).
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

from backends.launcher.bounded_log import LOG_BYTES_MAX
from backends.launcher.environment import PORT_MAX, PORT_MIN, free_ports
from backends.launcher.processes import (
    ChildProcess,
    Command,
    GrowingPauses,
    LimitedRestarts,
    RestartPolicy,
)
from backends.launcher.repository import (
    Ask,
    ModelLoad,
    ModelState,
    RepositoryMirror,
    TritonLog,
    WorkerFolders,
    ask_grpc,
    ask_http,
)

STUB = "triton_python_backend_stub"


class Stubs:
    """All processes of this host are looked at once for all Tritons, and strangers only once."""

    def __init__(self) -> None:
        self._strangers: set[str] = set()  # pids of processes that no Triton of ours has started

    def models_alive(self, triton_pids: Collection[int]) -> dict[int, set[str]]:
        """By tritonserver: the models that have a process."""
        found: dict[int, set[str]] = {pid: set() for pid in triton_pids}
        pids = set(filter(str.isdigit, os.listdir("/proc")))
        self._strangers &= pids  # a pid that was free in between may be anybody's
        for pid in pids - self._strangers:
            with contextlib.suppress(OSError):  # it ended while we look
                stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
                state, parent = stat.rpartition(") ")[2].split()[:2]
                if int(parent) not in found:
                    self._strangers.add(pid)
                elif state != "Z" and (arguments := _stub_arguments(pid)):
                    found[int(parent)].add(Path(arguments[1]).parents[1].name)
        return found


def end_orphans(launches: Collection[str]) -> None:
    """Ends processes of models that dead launches left: one whose Triton is killed while it loads
    may wait for it for ever. `launches` are the names that their shared memory begins with."""
    prefixes = tuple(f"{name}-" for name in launches)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if any(argument.startswith(prefixes) for argument in _stub_arguments(pid)):
                os.kill(int(pid), signal.SIGKILL)


def _stub_arguments(pid: str) -> list[str]:
    """[] for any other process."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "surrogateescape").split("\0")
    is_stub = len(arguments) > 1 and Path(arguments[0]).name == STUB
    return arguments if is_stub else []


class StubWatch:
    """Of one incarnation of a Triton."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def died(self, expected: set[str], alive: set[str]) -> list[str]:
        """Models of `expected` that had a process and have none now; each is named once."""
        lost = sorted((self._seen & expected) - alive)
        self._seen = alive
        return lost


FRONTEND = "frontend"
LOOPBACK = "127.0.0.1"
CRASHES_MAX = 2
PROMISED: dict[str, list[int]] = {}  # ports of each Triton's newest incarnation
INCARNATIONS = itertools.count(1)  # of all Tritons of this launcher
NUMBERS = itertools.count(1)  # a Triton's own, whatever its incarnations
DRAIN_S_MAX = 45.0  # a worker ends what it has within 30 s; then it leaves the directory
END_S_MAX = 5.0
# From a worker's word that it serves to Triton's that it is loaded, which takes milliseconds.
# Triton 2.51 waits for ever for a stub that stood still while it was loaded, and the worker, which
# is in the directory by then, refuses every call.
LOAD_SAID_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where one incarnation of a Triton listens, each as HOST:PORT; "" where it does not."""

    grpc: str
    metrics: str = ""
    http: str = ""
    called_grpc: str = ""  # where others call it, when that is not where it listens

    @property
    def called(self) -> str:
        return self.called_grpc or self.grpc


@dataclass(frozen=True, slots=True)
class Restart:
    """Something died and is started again."""

    name: str
    pause_s: float = 0.0  # it keeps dying, so not before this

    @property
    def said(self) -> str:
        when = f" in {self.pause_s:.0f} s" if self.pause_s else ""
        return f"{self.name} died, starting it again{when}"


@dataclass(frozen=True, slots=True)
class AnyPort:
    """Where a Triton listens that was given no port."""

    listen: str = LOOPBACK
    called: str = ""  # by others, when that is not where it listens
    ports: tuple[int, int] = (PORT_MIN, PORT_MAX)

    def endpoints(self, metrics: str, promised: Collection[int]) -> Endpoints:
        [port] = free_ports(1, promised, *self.ports, self.listen)
        called = f"{self.called}:{port}" if self.called else ""
        return Endpoints(f"{self.listen}:{port}", metrics, called_grpc=called)


ANY_OF_LOOPBACK = AnyPort()
Plan = Callable[["Triton", Endpoints], Command]


class Triton:
    """The frontend's, and what a worker's has in common with it."""

    make_policy: Callable[[], RestartPolicy] = LimitedRestarts

    def __init__(
        self,
        name: str,
        mirror: RepositoryMirror,
        log_path: Path,
        cwd: Path,
        plan: Plan,
        fixed: Endpoints | None,
        any_port: AnyPort = ANY_OF_LOOPBACK,
        log_bytes_max: int = LOG_BYTES_MAX,
    ) -> None:
        """`fixed`: addresses that others know; without, it gets a port of its own at each start.
        Its metrics are on loopback always. Nothing is started yet."""
        self.name = name
        self.number = next(NUMBERS)
        self.mirror = mirror
        self.log_path = log_path
        self._log_bytes_max = log_bytes_max
        self._cwd, self._plan, self._fixed, self._any_port = cwd, plan, fixed, any_port
        self._log = TritonLog(log_path)
        self.endpoints: Endpoints | None = None  # of the running incarnation
        self.incarnation = 0  # its number
        self.child: ChildProcess | None = None
        self._starts = 0
        self._crashes = 0  # before it was ready for the first time
        self._stubs = StubWatch()
        self._loaded: set[str] = set()  # by this incarnation
        self._loads: list[ModelLoad] = []

    def start(self) -> None:
        self.child = ChildProcess(
            self.name,
            self._command,
            self.log_path,
            self._cwd,
            self.make_policy(),
            self._log_bytes_max,
        )
        self._began()

    def _start_again(self, child: ChildProcess) -> None:
        child.start_again()
        self._began()

    def _began(self) -> None:
        """A new incarnation of the process."""
        assert self.child is not None
        self._starts = self.child.starts
        self._stubs = StubWatch()
        self._loaded.clear()

    def _command(self) -> Command:
        promised = {port for each in PROMISED.values() for port in each}
        [port] = free_ports(1, promised)
        metrics = f"{LOOPBACK}:{port}"
        if self._fixed:
            self.endpoints = replace(self._fixed, metrics=metrics)
        else:
            self.endpoints = self._any_port.endpoints(metrics, {*promised, port})
        PROMISED[self.name] = [port, int(self.endpoints.grpc.rpartition(":")[2])]
        self._read_log()
        self._log.service_problem = ""
        self._log.is_load_pending = False
        self.incarnation = next(INCARNATIONS)
        return self._plan(self, self.endpoints)

    @property
    def pid(self) -> int | None:
        """While it runs."""
        return self.child.pid if self.child is not None and self.child.is_alive else None

    def supervise(self, alive: set[str]) -> list[Restart]:
        """Carries edits over and starts again what died; `alive`: its models with a process."""
        self.mirror.sync()
        if self.child is None:
            return []
        restarts = [Restart(model) for model in self._died(alive)]
        self._log.moved(self.child.bound_log())  # behind _died, which has read all of it
        if self.child.is_alive and self.service_problem():
            self.child.kill()  # somebody else took its port: the next incarnation gets another
        pause_s = self.child.supervise()
        if pause_s is not None:
            restarts.append(Restart(self.name, pause_s))
        if self.child.starts != self._starts:
            self._began()
        return restarts

    def _died(self, alive: set[str]) -> list[str]:
        """Models whose process died and that were started again, without the rest of Triton."""
        self._read_log()
        # The process of a model that does not load comes and goes with each attempt of Triton's,
        # so only models that were loaded are expected to have one.
        died = self._stubs.died(self.mirror.models() & self._loaded, alive)
        return [model for model in died if self._revive(model)]

    def _revive(self, model: str) -> bool:
        if 'backend: "conductor"' in self.mirror.config(model) and self.child is not None:
            # Triton would leave the clients of its streams waiting for ever, and may abort
            # when the model is started again: better an error at once and a fresh Triton.
            self.child.kill()
            return False
        self.mirror.revive(model)
        return True

    def service_problem(self) -> str:
        """Why this incarnation serves without one of its ports; "" if it has all."""
        self._read_log()
        return self._log.service_problem

    def supervise_start(self) -> str:
        """Until it is ready for the first time: the reason why it cannot start, or "".

        A port of its own that somebody took is replaced by another. A Triton that a signal ended is
        started again, CRASHES_MAX times: on a busy machine 2.51 aborts now and then while it makes
        the shared memory of its models. ChildDied when it ended by itself, or too often.
        """
        if self.child is None:
            self.mirror.sync()
            return ""
        problem = self.service_problem()  # that of gRPC ends Triton, that of metrics does not
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
        """Loads and refusals since the last call."""
        self._read_log()
        loads, self._loads = self._loads, []
        return [*loads, *self.mirror.take_refusals()]

    def _read_log(self) -> None:
        if self.child is None:
            return  # The file there is of another incarnation.
        news = self._log.news()
        self._loads += news
        for load in news:
            self.mirror.edits.heard(load)
        self._loaded |= {load.model for load in news if not load.reason}

    def states(self) -> list[ModelState] | None:
        """One for each of its models; None while it does not answer.

        From any thread. A Triton answers only after it has tried each of its models once.
        """
        models, ask = sorted(self.mirror.models()), self._principal()
        if ask is None:
            return None
        answers = {model: ask(model) for model in models}
        if None in answers.values():
            return None
        return [ModelState(model, bool(is_ready)) for model, is_ready in answers.items()]

    def _principal(self) -> Ask | None:
        endpoints = self.endpoints
        if endpoints is None:
            return None
        return ask_http(endpoints.http) if endpoints.http else ask_grpc(endpoints.called)


class WorkerTriton(Triton):
    """A worker's own: started when its folder is complete, ended when it is gone."""

    make_policy = GrowingPauses

    def __init__(
        self,
        worker: str,
        repository: Path,
        target: Path,
        log_path: Path,
        cwd: Path,
        plan: Plan,
        fixed: Endpoints | None = None,
        any_port: AnyPort = ANY_OF_LOOPBACK,
        log_bytes_max: int = LOG_BYTES_MAX,
        folders: WorkerFolders | None = None,
    ) -> None:
        mirror = RepositoryMirror(
            repository,
            target,
            lambda name: name == worker and self._draining_from_s is None,
            folders,
        )
        super().__init__(worker, mirror, log_path, cwd, plan, fixed, any_port, log_bytes_max)
        self._draining_from_s: float | None = None
        self._ending_from_s: float | None = None
        self._load_pending_from_s: float | None = None

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
        elif now_s - self._load_pending_from_s > LOAD_SAID_S_MAX:
            self._load_pending_from_s = None
            self.child.kill()

    def _revive(self, model: str) -> bool:
        """Its model is all it is for: when that dies, the whole Triton is started afresh."""
        assert self.child is not None
        self.child.kill()
        return False

    def drain(self, alive: set[str]) -> bool:
        """Its folder is gone: let it end what it has. Call it until it says True: it ended."""
        now_s = time.monotonic()
        if self._draining_from_s is None:
            self._draining_from_s = now_s
        self.mirror.sync()  # Triton unloads the model, which ends when its requests have
        if self.child is None:
            return True
        if not self.child.is_alive:
            self.child.kill()  # what is left of its process group: stubs that hang
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
    """By name; those of a Triton that does not answer are not ready."""
    found = []
    for triton, answer in answers:
        found += answer or [ModelState(model, False) for model in triton.mirror.models()]
    return sorted(found, key=lambda state: state.name)
