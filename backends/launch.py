"""`mooncake serve`: everything on one machine, started in order, stopped in order.

Directory, then storage nodes, then Triton with its models; ready when every model is. Whatever
ends the launcher (Ctrl-C, SIGTERM, a child that keeps dying, a model that does not load at the
start), its processes end too and its files in /dev/shm and its sockets are removed.
Not here: checks of the machine (environment.py), the staged backends (staging.py), child
processes (processes.py), its files and those of dead launchers (launch_files.py), what Triton says
of its models (repository.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from backends import environment, staging
from backends.launch_files import LaunchFiles, remove_leftovers
from backends.mirror import RepositoryMirror
from backends.processes import Child
from backends.repository import ModelState, RepositoryWatch
from backends.stub_watch import StubWatch
from mooncake_store import self_check

TRITON_SHM_BYTES = 256 * 2**20  # what the stubs' request pools may grow to, all models together
STOP_S_MAX = 9.0
UNIT_BYTES = 16 * 2**10  # grain of the storage nodes' memory: headers take 0.4 % of it


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `mooncake serve` may be told; paths, ports and sizes of one machine."""

    model_repository: Path
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    nodes: tuple[str, ...] = ("s0", "s1")
    store_bytes: int = 1 << 30  # of each storage node, in DRAM
    ssd_bytes: int = 0  # of each storage node; 0: no SSD tier
    ssd_path: Path | None = None  # default: in state_dir
    state_dir: Path = Path(".mooncake")
    ready_s_max: float = 300.0
    is_self_checked: bool = False
    triton_args: tuple[str, ...] = field(default=())


class Stopped(Exception):
    """A signal asked the launcher to end."""


class Launcher:
    """The processes of one `mooncake serve` and what they leave on disk."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self._files = LaunchFiles()
        self.name = self._files.name
        self.children: list[Child] = []
        self.state_dir = options.state_dir.resolve()
        self.log_dir = self.state_dir / f"logs-{options.http_port}"
        self.socket_dir = self._files.socket_dir
        self.mirror = RepositoryMirror(
            options.model_repository, self.state_dir / f"repository-{options.http_port}"
        )
        self._stubs: StubWatch | None = None
        self.directory_address = f"ipc://{self.socket_dir}/directory"
        self.events_address = f"ipc://{self.socket_dir}/events"

    def start(self) -> None:
        """Start directory, storage nodes and Triton; returns when all of them run."""
        triton = environment.find_triton()
        options = self.options
        remove_leftovers()
        self._check(triton)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        env = self._environment(triton)
        python = [sys.executable, "-m"]
        directory = self._child(
            "directory",
            [*python, "mooncake_store.directory_server", "--address", self.directory_address,
             "--events", self.events_address,
             *(["--self-check"] if options.is_self_checked else [])], env)  # fmt: skip
        directory.wait_for_line("ready", 20.0)
        nodes = [
            self._child(
                f"node-{node}",
                [*python, "mooncake_store.node", "--node-id", node, "--die-with-parent",
                 "--directory", self.directory_address,
                 "--segment-bytes", str(options.store_bytes),
                 "--segment-path", str(self._files.path(node)),
                 "--unit-bytes", str(UNIT_BYTES),
                 "--control", f"ipc://{self.socket_dir}/{node}", *self._ssd(node)], env)
            for node in options.nodes
        ]  # fmt: skip
        for node in nodes:
            node.wait_for_line("ready", 60.0)
        staged = staging.stage(triton, self.state_dir / f"backends-{options.http_port}")
        self.mirror.sync(is_first=True)
        child = self._child("triton", self._triton_command(triton, staged), env)
        self._stubs = StubWatch(child.pid)

    def _ssd(self, node: str) -> list[str]:
        """Blocks on SSD outlive this launcher: the folder is the node's, not the run's."""
        if not self.options.ssd_bytes:
            return []
        folder = (self.options.ssd_path or self.state_dir / "ssd").resolve() / node
        folder.mkdir(parents=True, exist_ok=True)
        size_bytes = -(-self.options.ssd_bytes // UNIT_BYTES) * UNIT_BYTES
        return ["--ssd-path", str(folder), "--ssd-bytes", str(size_bytes)]

    def wait_ready(self) -> list[ModelState]:
        """Until every model of the repository serves; raises with what the models said if not."""
        watch = RepositoryWatch(self.mirror.target, self.http_url, self.triton_log)
        give_up_s = time.monotonic() + self.options.ready_s_max
        refusals: dict[str, None] = {}  # in order, each once: Triton tries again and again
        while True:
            self.check_children()
            states = watch.states()
            self._check_services()
            refusals |= {f"{load.model}: {load.reason}": None
                         for load in watch.news() if load.reason}  # fmt: skip
            if refusals and states:  # Triton answers only after it tried every model once
                raise environment.EnvironmentProblem(
                    "these models did not load:\n" + "\n".join(refusals)
                )
            if states and all(state.is_ready for state in states):
                return states
            if time.monotonic() > give_up_s:
                waiting = ", ".join(state.name for state in states if not state.is_ready)
                raise environment.EnvironmentProblem(
                    f"not ready after {self.options.ready_s_max:.0f} s, still waiting for "
                    f"{waiting or 'Triton'}; see {self.triton_log}"
                )
            time.sleep(0.1)

    def _check_services(self) -> None:
        """Triton goes on without a service whose port was taken after our own check."""
        for line in self.triton_log.read_text(errors="replace").splitlines():
            if "failed to start" in line and "service" in line:
                raise environment.EnvironmentProblem(line.partition('] "')[2].rstrip('" '))

    def tend(self) -> list[str]:
        """Call it often while serving: carries edits over, starts again what died.

        Whatever it is, the others find it again by themselves, and KV stays in nodes that live.
        Returns what is started again; ChildDied when something does not stay up.
        """
        assert self._stubs is not None, "tend() before start()"
        restarted = [child for child in self.children if child.restart_if_dead()]
        for child in restarted:
            if child.name == "triton":
                self._stubs = StubWatch(child.pid)
        died = self._stubs.died({path.name for path in self.mirror.target.iterdir()})
        for model in died:
            self.mirror.revive(model)
            if 'backend: "conductor"' in self.mirror.config(model):
                # Triton would leave the clients of its streams waiting for ever, and may abort
                # when the model is started again: better an error at once and a fresh Triton.
                self._triton().kill()
        self.mirror.sync()
        return [child.name for child in restarted] + died

    def _triton(self) -> Child:
        return next(child for child in self.children if child.name == "triton")

    def check_children(self) -> None:
        for child in self.children:
            child.check_alive()

    def stop(self) -> None:
        """End everything, Triton first so that its workers can leave the directory in order."""
        give_up_s = time.monotonic() + STOP_S_MAX
        for child in reversed(self.children):
            child.terminate()
            if child.name == "triton":
                child.finish(give_up_s - time.monotonic() - 2.0)
        for child in reversed(self.children):
            child.finish(give_up_s - time.monotonic())
        self._files.remove()

    @property
    def http_url(self) -> str:
        return f"http://{self.options.address}:{self.options.http_port}"

    @property
    def triton_log(self) -> Path:
        return self.log_dir / "triton.log"

    def _child(self, name: str, command: list[str], env: dict[str, str]) -> Child:
        child = Child(name, command, self.log_dir / f"{name}.log", self.socket_dir, env)
        self.children.append(child)
        return child

    def _check(self, triton: environment.TritonInstall) -> None:
        options = self.options
        if not options.model_repository.is_dir():
            raise environment.EnvironmentProblem(
                f"there is no model repository at {options.model_repository}; run from the "
                "project's root or name one with --model-repository"
            )
        ports = {name: (options.address, getattr(options, f"{name}_port"))
                 for name in ("http", "grpc", "metrics")}  # fmt: skip
        needed = options.store_bytes * len(options.nodes) + TRITON_SHM_BYTES
        found = list(environment.problems(triton, ports, needed, threads_wanted=400))
        if found:
            raise environment.EnvironmentProblem("\n" + "\n".join(f"  - {line}" for line in found))

    def _environment(self, triton: environment.TritonInstall) -> dict[str, str]:
        env = dict(os.environ)
        # A folder of the linker's own, put first, would hide what an image put before it.
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
        host = "127.0.0.1" if self.options.address == "0.0.0.0" else self.options.address
        env["MOONCAKE_GRPC"] = f"{host}:{self.options.grpc_port}"
        env["MOONCAKE_REPOSITORY"] = str(self.mirror.source)
        return env

    def _triton_command(self, triton: environment.TritonInstall, staged: Path) -> list[str]:
        options = self.options
        return [
            str(triton.server),
            f"--model-repository={self.mirror.target}",
            f"--backend-directory={staged}",
            f"--http-address={options.address}", f"--http-port={options.http_port}",
            f"--grpc-address={options.address}", f"--grpc-port={options.grpc_port}",
            f"--metrics-address={options.address}", f"--metrics-port={options.metrics_port}",
            "--model-control-mode=poll", "--repository-poll-secs=1", "--exit-timeout-secs=5",
            "--exit-on-error=false", "--disable-auto-complete-config",
            "--strict-readiness=false", "--allow-gpu-metrics=false",
            f"--backend-config=python,shm-region-prefix-name={self.name}-triton",
            *(f"--backend-config={name},shm-region-prefix-name={self.name}-{name}"
              for name in staging.OUR_BACKENDS),
            *options.triton_args,
        ]  # fmt: skip


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
