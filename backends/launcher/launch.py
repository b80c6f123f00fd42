"""`mooncake serve`: everything on one machine, started in order, stopped in order.

Directory, then storage nodes, then the Tritons: one for the models that clients call and one for
each worker folder; ready when every model is. Whatever ends the launcher (Ctrl-C, SIGTERM, a child
that keeps dying, a model that does not load at the start), its processes end too and its files in
/dev/shm and its sockets are removed.
Triton wants `<backend-directory>/python/` with real copies of its Python backend (a symbolic link
is refused) and one folder per backend of ours beside it: `stage` makes that folder.

Not here: checks of the machine (environment.py), child processes (processes.py), its files and
those of dead launchers (launch_files.py), one Triton (triton_process.py), the metrics port
(metrics_server.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from backends import launch_secret
from backends.launcher import admin_key, environment
from backends.launcher.admin_key import AdminKey
from backends.launcher.launch_files import LaunchFiles, remove_leftovers
from backends.launcher.metrics_server import MetricsServer, MetricsSource
from backends.launcher.processes import ChildProcess, Command
from backends.launcher.repository import ModelLoad, ModelState, RepositoryMirror, WorkerFolders
from backends.launcher.triton_process import (
    FRONTEND,
    PROMISED,
    Endpoints,
    Restart,
    Stubs,
    Triton,
    WorkerTriton,
    end_orphans,
)
from mooncake_store.cli.serving import directory_address, directory_command, node_command
from mooncake_store.process import self_check

TRITON_SHM_BYTES = 256 * 2**20  # what the stubs' request pools may grow to, all models together
STOP_S_MAX = 9.0  # of it at most so much for the frontend's Triton, so much after the workers':
FRONTEND_STOP_S, OTHERS_STOP_S = 5.0, 1.0
FRONTEND_EXIT_S, WORKER_EXIT_S = 4, 5  # that a Triton waits for requests and models to end


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `mooncake serve` can be asked for: paths, ports and sizes of one machine."""

    model_repository: Path
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    metrics_address: str = "127.0.0.1"
    nodes: tuple[str, ...] = ("s0", "s1")
    store_bytes: int = 1 << 30  # of each storage node, in DRAM
    ssd_bytes: int = 0  # of each storage node; 0: no SSD tier
    ssd_path: Path | None = None  # default: in state_dir
    state_dir: Path = Path(".mooncake")
    ready_s_max: float = 300.0
    is_self_checked: bool = False
    open_apis: tuple[str, ...] = ()  # that need no admin key (admin_key.py)
    triton_args: tuple[str, ...] = field(default=())


class Stopped(Exception):
    """A signal asked the launcher to end."""


class Launcher:
    """The processes of one `mooncake serve` and what they leave on disk."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self._files = LaunchFiles()
        self.name = self._files.name
        self._secret = launch_secret.make_secret()
        self.children: list[ChildProcess] = []
        self.state_dir = options.state_dir.resolve()
        self._admin_key = AdminKey(self.state_dir / f"admin-key-{options.http_port}")
        self.log_dir = self.state_dir / f"logs-{options.http_port}"
        self.socket_dir = self._files.socket_dir
        self.repository = options.model_repository.resolve()
        self._mirrors = self.state_dir / f"repository-{options.http_port}"
        self._worker_folders = WorkerFolders(self.repository)
        self._worker_names: set[str] = set()
        self.frontend: Triton | None = None
        self.workers: dict[str, WorkerTriton] = {}
        self._leaving: list[WorkerTriton] = []  # their folders are gone
        self._stubs = Stubs()
        self._metrics: MetricsServer | None = None
        self.directory_address = directory_address(self.socket_dir)
        self.events_address = f"ipc://{self.socket_dir}/events"

    def start(self) -> None:
        """Start directory, storage nodes and Tritons; returns when all of them run."""
        triton = environment.find_triton()
        options = self.options
        end_orphans(remove_leftovers())
        self._check(triton)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._admin_key.write()
        env = self._environment(triton)
        checked = ["--self-check"] if options.is_self_checked else []
        directory = self._child(
            "directory",
            directory_command(self.directory_address, self.events_address, *checked),
            env,
        )
        directory.wait_for_line("ready", 20.0)
        nodes = [self._child(f"node-{node}", self._node_command(node), env)
                 for node in options.nodes]  # fmt: skip
        for node in nodes:
            node.wait_for_line("ready", 60.0)
        self._staged = stage(triton, self.state_dir / f"backends-{options.http_port}")
        self._server, self._env = triton.server, env
        shutil.rmtree(self._mirrors, ignore_errors=True)
        PROMISED["clients"] = [options.http_port, options.grpc_port, options.metrics_port]
        self._start_tritons()
        try:
            self._metrics = MetricsServer(
                (options.metrics_address, options.metrics_port), self._sources, self.states
            )
        except OSError as error:
            raise environment.EnvironmentProblem(
                f"metrics port {options.metrics_address}:{options.metrics_port} cannot be used "
                f"({error.strerror}); choose another with --metrics-port"
            ) from None

    def _start_tritons(self) -> None:
        """All at once: they need each other only when requests come."""
        self._worker_names = self._worker_folders.names()
        self.frontend = self._frontend()
        self.frontend.mirror.sync(is_first=True)
        self.frontend.start()
        for name in sorted(self._worker_names):
            self._add_worker(name)
            self.workers[name].mirror.sync(is_first=True)
            if self.workers[name].mirror.models():
                self.workers[name].start()

    def _frontend(self) -> Triton:
        options = self.options
        return Triton(
            FRONTEND,
            RepositoryMirror(
                self.repository, self._mirrors / FRONTEND,
                lambda name: name not in self._worker_names,
            ),
            self.log_dir / f"{FRONTEND}.log", self.socket_dir, self._triton_command,
            Endpoints(f"{options.address}:{options.grpc_port}", "",
                      f"{options.address}:{options.http_port}"),
        )  # fmt: skip

    def _add_worker(self, name: str) -> None:
        self.workers[name] = WorkerTriton(
            name, self.repository, self._mirrors / name, self.log_dir / f"{name}.log",
            self.socket_dir, self._triton_command,
        )  # fmt: skip

    def _node_command(self, node: str) -> list[str]:
        options = self.options
        ssd_folder = (options.ssd_path or self.state_dir / "ssd").resolve()
        segment = ["--segment-path", str(self._files.path(node))]
        return node_command(
            self.directory_address,
            node,
            options.store_bytes,
            f"ipc://{self.socket_dir}/{node}",
            ssd_folder,
            options.ssd_bytes,
            *segment,
        )

    def wait_ready(self) -> list[ModelState]:
        """Until every model of the repository serves; raises with what the models said if not."""
        give_up_s = time.monotonic() + self.options.ready_s_max
        refusals: dict[str, None] = {}  # in order, each once: Triton tries again and again
        while True:
            for child in self.children:
                child.check_alive()
            answers: list[tuple[Triton, list[ModelState] | None]] = []
            for triton in self._tritons():
                if problem := triton.supervise_start():
                    raise environment.EnvironmentProblem(problem)
                answers.append((triton, triton.states()))
                refusals |= {f"{load.model}: {load.reason}": None
                             for load in triton.take_loads() if load.reason}  # fmt: skip
            if refusals:  # this start ends: the conductor need not wait for workers any more
                self._files.say_stopping()
            # A Triton answers only after it tried each of its models once: all reasons are known.
            if refusals and all(answer is not None for _, answer in answers):
                raise environment.EnvironmentProblem(
                    "these models did not load:\n" + "\n".join(refusals)
                )
            states = _all_states(answers)
            if states and all(state.is_ready for state in states):
                return states
            if time.monotonic() > give_up_s:
                waiting = ", ".join(state.name for state in states if not state.is_ready)
                raise environment.EnvironmentProblem(
                    f"not ready after {self.options.ready_s_max:.0f} s, still waiting for "
                    f"{waiting or 'Triton'}; see {self.log_dir}"
                )
            time.sleep(0.1)

    def supervise(self) -> list[Restart]:
        """Call it often while serving: carries edits over, starts again what died.

        Whatever it is, the others find it again by themselves, and KV stays in nodes that live.
        ChildDied when something that all others need does not stay up.
        """
        restarts = [
            Restart(child.name, pause_s)
            for child in self.children if (pause_s := child.supervise()) is not None
        ]  # fmt: skip
        everyone = [*self._tritons(), *self._leaving]
        by_pid = self._stubs.models_alive(
            {triton.pid for triton in everyone if triton.pid is not None}
        )
        alive = {triton: by_pid.get(triton.pid or 0, set()) for triton in everyone}
        self._supervise_folders(alive)
        for triton in self._tritons():
            restarts += triton.supervise(alive.get(triton, set()))
        return restarts

    def _supervise_folders(self, alive: dict[Triton, set[str]]) -> None:
        """A worker folder that was copied gets a Triton, one that was removed loses it."""
        self._worker_names = self._worker_folders.names()
        self._leaving = [worker for worker in self._leaving if not worker.drain(alive[worker])]
        for name in self.workers.keys() - self._worker_names:
            self._leaving.append(self.workers.pop(name))
        busy = {worker.name for worker in self._leaving}
        for name in sorted(self._worker_names - self.workers.keys() - busy):
            self._add_worker(name)

    def news(self) -> list[ModelLoad]:
        """Loads and refusals since the last call."""
        return [load for triton in self._tritons() for load in triton.take_loads()]

    def states(self) -> list[ModelState]:
        """Of every model; one whose Triton does not answer is not ready. From any thread."""
        return _all_states([(triton, triton.states()) for triton in self._tritons()])

    def _tritons(self) -> list[Triton]:
        frontend = [self.frontend] if self.frontend is not None else []
        return [*frontend, *list(self.workers.values())]

    def _sources(self) -> list[MetricsSource]:
        return [
            MetricsSource(triton.name, triton.incarnation, triton.endpoints.metrics)
            for triton in [*self._tritons(), *list(self._leaving)]
            if triton.endpoints is not None and triton.pid is not None
        ]

    def stop(self) -> None:
        """End everything: first the Triton that clients call, so that nobody calls the workers'
        any more; then those, so that workers can leave the directory in order."""
        give_up_s = time.monotonic() + STOP_S_MAX
        self._files.say_stopping()
        if self._metrics is not None:
            self._metrics.close()
        first = [self.frontend] if self.frontend is not None else []
        self._end([each.child for each in first], FRONTEND_STOP_S)
        workers = [*self.workers.values(), *self._leaving]
        left_s = give_up_s - time.monotonic()
        self._end([each.child for each in workers], left_s - OTHERS_STOP_S)
        self._end(self.children[::-1], give_up_s - time.monotonic())
        self._admin_key.remove()
        self._files.remove()

    def _end(self, children: list[ChildProcess | None], within_s: float) -> None:
        """Ask all at once, wait, kill what is left."""
        running = [child for child in children if child is not None]
        give_up_s = time.monotonic() + within_s
        for child in running:
            child.terminate()
        for child in running:
            child.finish(give_up_s - time.monotonic())

    @property
    def http_url(self) -> str:
        return f"http://{self.options.address}:{self.options.http_port}"

    def _child(self, name: str, command: list[str], env: dict[str, str]) -> ChildProcess:
        log_path = self.log_dir / f"{name}.log"
        child = ChildProcess(name, lambda: Command(command, env), log_path, self.socket_dir)
        self.children.append(child)
        return child

    def _check(self, triton: environment.TritonInstall) -> None:
        options = self.options
        if not options.model_repository.is_dir():
            raise environment.EnvironmentProblem(
                f"there is no model repository at {options.model_repository}; run from the "
                "project's root or name one with --model-repository"
            )
        ports = {
            "http": (options.address, options.http_port),
            "grpc": (options.address, options.grpc_port),
            "metrics": (options.metrics_address, options.metrics_port),
        }
        needed = options.store_bytes * len(options.nodes) + TRITON_SHM_BYTES
        found = admin_key.problems(options.open_apis)
        found += environment.problems(triton, ports, needed, threads_wanted=500)
        if found:
            raise environment.EnvironmentProblem("\n" + "\n".join(f"  - {line}" for line in found))

    def _environment(self, triton: environment.TritonInstall) -> dict[str, str]:
        env = dict(os.environ)
        # Folders where the linker looks anyway are left out: put first, they would hide what the
        # image put before them.
        folders = [environment.libpython_folder(), *triton.library_folders]
        libraries = [str(each) for each in folders if each not in environment.linker_folders()]
        if given := env.get("LD_LIBRARY_PATH"):
            libraries.append(given)
        env["LD_LIBRARY_PATH"] = ":".join(libraries)
        env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
        env["PYTHONUNBUFFERED"] = "1"
        # glibc gives each of many threads an arena of its own, whose free memory stays there.
        env.setdefault("MALLOC_ARENA_MAX", "2")
        env.pop("PYTHONHOME", None)
        env["MOONCAKE_DIRECTORY"] = self.directory_address
        env["MOONCAKE_EVENTS"] = self.events_address
        env["MOONCAKE_SOCKETS"] = str(self.socket_dir)
        env["MOONCAKE_STATE"] = str(self.state_dir)
        env[self_check.VARIABLE] = "1" if self.options.is_self_checked else "0"
        env[launch_secret.SECRET_VARIABLE] = self._secret
        env["MOONCAKE_REPOSITORY"] = str(self.repository)
        return env

    def _triton_command(self, triton: Triton, endpoints: Endpoints) -> Command:
        """How an incarnation of a Triton is started; memory of the one before it is removed."""
        part = f"triton{triton.number}-"  # of a name, another could be the beginning
        self._files.remove_part(part)
        prefix = f"{self.name}-{part}"
        is_public = triton is self.frontend
        backends = ("python", *OUR_BACKENDS)
        arguments = [
            str(self._server),
            f"--model-repository={triton.mirror.target}",
            f"--backend-directory={self._staged}",
            *listening("grpc", endpoints.grpc), *listening("metrics", endpoints.metrics),
            *(listening("http", endpoints.http) if endpoints.http else ["--allow-http=false"]),
            "--model-control-mode=poll", "--repository-poll-secs=1",
            f"--exit-timeout-secs={FRONTEND_EXIT_S if is_public else WORKER_EXIT_S}",
            "--exit-on-error=false", "--disable-auto-complete-config",
            "--strict-readiness=false", "--allow-gpu-metrics=false",
            f"--allow-cpu-metrics={str(is_public).lower()}",
            *(f"--backend-config={name},shm-region-prefix-name={prefix}{name}"
              for name in backends),
            *(self._admin_key.for_clients(self.options.open_apis) if is_public
              else self._admin_key.for_worker()),
            *(self.options.triton_args if is_public else ()),
        ]  # fmt: skip
        # Workers tell the directory where they are called.
        return Command(arguments, self._env | {"MOONCAKE_GRPC": endpoints.grpc})


def _all_states(answers: Iterable[tuple[Triton, list[ModelState] | None]]) -> list[ModelState]:
    found = []
    for triton, answer in answers:
        found += answer or [ModelState(model, False) for model in triton.mirror.models()]
    return sorted(found, key=lambda state: state.name)


def listening(service: str, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return [f"--{service}-address={host}", f"--{service}-port={port}"]


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> None:
    """From here on nothing interrupts the clean-up."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped, once; later ones are ignored while stopping."""

    def stop(number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        raise Stopped(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


OUR_BACKENDS = ("preprocessing", "postprocessing", "conductor", "prefill", "decode")


def stage(triton: environment.TritonInstall, folder: Path) -> Path:
    """Fill `folder` with the Python backend and ours; returns it, for --backend-directory."""
    if folder.exists():
        shutil.rmtree(folder)
    python = folder / "python"
    python.mkdir(parents=True)
    for source in triton.python_backend.iterdir():
        if source.suffix in (".so", ".py"):
            shutil.copyfile(source, python / source.name)
    stub = python / "triton_python_backend_stub"
    shutil.copyfile(triton.stub, stub)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP)
    ours = Path(__file__).parents[1]
    for name in OUR_BACKENDS:
        (folder / name).mkdir()
        shutil.copyfile(ours / name / "model.py", folder / name / "model.py")
    return folder
