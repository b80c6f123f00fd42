"""Makes NIXL agents with usable defaults: environment, logging, threads, errors.

An agent is an endpoint of NIXL in a process. The Python package nixl wraps NIXL, which moves bytes
by UCX. Problems of this wrapper, measured with nixl 1.5.1 on a machine without RDMA:

- Its progress thread spins on a whole core (pthrDelay = 0, hard-coded). A node's agent gets a
  progress thread that sleeps up to 10 ms and is woken by events. That takes 0.5 % of a core when
  idle (2.5 % with 1 ms, with equally fast reads over TCP). A client's agent has no progress thread:
  its transfers advance when the client polls.
- It logs to stdout, and continues without a transport when a plugin is missing. This module raises
  NixlUnavailable for every warning of the wrapper, and lets UCX log to stderr.
- Destroying an agent may abort the process, so agents with UCX are never destroyed (make_agent).
- It fails with a filesystem error if HOME is unreadable. It crashes at exit if Debian's libibverbs
  is installed too (remedy: UCX_MODULES=^ib, or os._exit on RDMA hosts).

UCX reads its settings when an agent is made, so this module sets most of them before it imports
nixl. The environment can override each of them (setdefault). An agent for certain network cards is
made with a UCX_NET_DEVICES of its own. Without RDMA it also gets UCX_TLS=tcp, so that UCX never
copies through the kernel between processes that only seem to be on two hosts.

Not here: moving bytes (nixl_transport.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake_store.errors import StoreError, TransferFailed
from mooncake_store.transports.host_topology import preferred_ucx_devices

# An idle node's progress thread wakes up after this time. An event wakes it earlier, except for
# events that UCX loses (a bug): they wait for the wake-up.
NODE_PROGRESS_DELAY_US = 10_000
# Builds of NIXL. The package `nixl` only chooses between them. Without a GPU it imports torch (0.7
# s, 150 MB) to look for CUDA, then takes the first build. So hosts without a GPU try it last.
_BUILDS = ("nixl_cu13._api", "nixl_cu12._api")
_CHOOSER = "nixl._api"
_LISTENS = "0A"  # state LISTEN in /proc/net/tcp
_making = threading.Lock()


class NixlUnavailable(StoreError):
    """NIXL cannot be used in this process; the message names the reason and the remedy."""


class AgentDevices(NamedTuple):
    """The network cards of one agent. By default, the environment names them."""

    net_devices: str = ""  # in the format of UCX_NET_DEVICES
    is_tcp_only: bool = False  # UCX_TLS=tcp, unless the environment sets UCX_TLS

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Set the variables that UCX reads when an agent is made, until the context exits."""
        wished = {"UCX_NET_DEVICES": self.net_devices} if self.net_devices else {}
        if self.is_tcp_only and "UCX_TLS" not in os.environ:
            wished["UCX_TLS"] = "tcp"
        before = {name: os.environ.get(name) for name in wished}
        os.environ.update(wished)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    @property
    def remedy(self) -> str:
        return f"; is the network card {self.net_devices} up?" if self.net_devices else ""


ALL_DEVICES = AgentDevices()


def has_rdma() -> bool:
    """True if this host has an InfiniBand or RoCE device."""
    with contextlib.suppress(OSError):
        return any(Path("/sys/class/infiniband").iterdir())
    return False


def prepare_environment() -> None:
    """Set the variables that UCX and NIXL read once, when they are loaded."""
    if not has_rdma():
        os.environ.setdefault("UCX_MODULES", "^ib")
    elif devices := preferred_ucx_devices():
        os.environ.setdefault("UCX_NET_DEVICES", devices)
    # UCX's default is 8 KiB. 128 KiB, set in both processes, doubles the rate of a READ over TCP.
    # UCX refuses to start if RX is smaller than TX, so a setting of one from the environment counts
    # for both.
    segment = os.environ.get("UCX_TCP_TX_SEG_SIZE") or os.environ.get("UCX_TCP_RX_SEG_SIZE", "128K")
    os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", segment)
    os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", segment)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # UCX warnings go to stdout otherwise
    home = os.environ.get("HOME")
    if home and os.path.isdir(home) and not os.access(home, os.R_OK | os.X_OK):
        raise NixlUnavailable(
            f"NIXL looks for $HOME/.nixl.cfg, but HOME={home} is not readable by user "
            f"{os.getuid()}: set HOME to a folder of that user"
        )


class _RaiseOnWarning(logging.Handler):
    """Raises the errors that NIXL's wrapper only logs."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            raise NixlUnavailable(f"NIXL: {record.getMessage()}")


@lru_cache(maxsize=1)
def load_nixl() -> Any:
    """Import NIXL's module `_api`, once per process. Raises NixlUnavailable on failure."""
    prepare_environment()
    raises_in_handlers = logging.raiseExceptions
    try:
        api = _import_first(_modules())
    except (ImportError, OSError) as error:
        raise NixlUnavailable(
            f"cannot import nixl ({error}): pip install 'mooncake-triton[nixl]' (CPU hosts too; "
            "[nixl-cu12] for CUDA 12), or use transports='mapped' on one host"
        ) from error
    finally:
        logging.raiseExceptions = raises_in_handlers  # importing nixl switches it off globally
    logger = logging.getLogger("nixl")
    logger.handlers[:] = [_RaiseOnWarning()]
    logger.propagate = False
    return api


def _modules() -> tuple[str, ...]:
    """Modules to import, by preference. With a GPU the build must match torch's CUDA version. The
    package `nixl` chooses that build. Without this package, _cuda_major() gives the version."""
    if not _has_gpu_stack():
        return (*_BUILDS, _CHOOSER)
    if importlib.util.find_spec("nixl") is not None:
        return (_CHOOSER,)
    return tuple(sorted(_BUILDS, key=lambda name: f"cu{_cuda_major()}." not in name))


def _cuda_major() -> str:
    """CUDA version of the installed torch; "": no torch, or torch without CUDA."""
    with contextlib.suppress(ImportError):
        cuda = importlib.import_module("torch.version").cuda
        return str(cuda or "").partition(".")[0]
    return ""


def _has_gpu_stack() -> bool:
    """True if there is a GPU driver, or torch has been imported."""
    return "torch" in sys.modules or os.path.exists("/proc/driver/nvidia")


def _import_first(names: Sequence[str]) -> Any:
    """The first of these modules that is installed."""
    for name in names[:-1]:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])


@lru_cache(maxsize=1)
def nixl_errors() -> tuple[type[Exception], ...]:
    """NIXL's exceptions. They share no base class, so they are found by name."""
    bindings = load_nixl().nixlBind
    found = [getattr(bindings, name) for name in dir(bindings) if name.endswith("Error")]
    return (*found, NixlUnavailable)


def make_agent(name: str, has_progress_thread: bool, devices: AgentDevices = ALL_DEVICES) -> Any:
    """A nixl_agent with the UCX backend. It is not thread-safe (SYNC_NONE); its owner has a lock.

    `name` must be unique over time too, because a peer rejects a name that it has seen before.

    An agent is never destroyed, because its destruction may abort the process after a peer has
    died, also at exit (UCX 1.23: "arbiter.c:36 Assertion `ucs_arbiter_group_is_empty(group)'
    failed"). So it gets a reference that is never released. nixl_transport.py reuses agents.
    """
    agent = _bare_agent(name, has_progress_thread)
    try:
        with _making, devices.environment():
            agent.create_backend("UCX", {"ucx_error_handling_mode": "peer", "num_workers": "1"})
    except nixl_errors() as error:
        raise NixlUnavailable(
            f"NIXL's UCX backend does not start ({error}); UCX_TLS={os.environ.get('UCX_TLS')}: "
            "leave UCX_TLS unset, or name tcp in it (only tcp reports errors of a peer)"
            f"{devices.remedy}"
        ) from error
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))
    return agent


def _bare_agent(name: str, has_progress_thread: bool) -> Any:
    api = load_nixl()
    failures: tuple[type[Exception], ...] = (*nixl_errors(), RuntimeError)
    # the config class is replaced for this call; there is no other way to set pthrDelay
    with _making:
        stock: Any = api.nixlBind.nixlAgentConfig
        api.nixlBind.nixlAgentConfig = _with_progress_delay(stock)
        try:
            config = api.nixl_agent_config(enable_prog_thread=has_progress_thread, backends=[])
            return api.nixl_agent(name, config)
        except failures as error:
            raise NixlUnavailable(f"cannot make NIXL agent {name}: {error}") from error
        finally:
            api.nixlBind.nixlAgentConfig = stock


def _with_progress_delay(stock: Any) -> Any:
    """The config class with pthrDelay fixed, whatever value the wrapper assigns."""

    def assign(self: Any, field: str, value: object) -> None:
        stock.__setattr__(self, field, NODE_PROGRESS_DELAY_US if field == "pthrDelay" else value)

    return type("nixlAgentConfig", (stock,), {"__setattr__": assign})


def _listening_ports() -> set[int]:
    ours = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            ours.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text(encoding="utf-8").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in ours:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return found


class NodeAgent:
    """A storage node's agent, which registers the segment once. NIXL's progress thread serves
    peers, without the GIL."""

    def __init__(
        self, name: str, address: int, size_bytes: int, devices: AgentDevices = ALL_DEVICES
    ) -> None:
        self.name = name
        before = _listening_ports()
        self._agent = make_agent(name, has_progress_thread=True, devices=devices)
        # Ports on which this agent listens; wrong if another thread opens a port at the same time.
        self.ports = sorted(_listening_ports() - before)
        self._memory: Any = self._agent.register_memory([(address, size_bytes, 0, "")], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()

    def close(self) -> None:
        """Deregister the memory. A second call has no effect. Peers are disconnected when the
        process ends."""
        if self._memory is None:
            return
        with contextlib.suppress(*nixl_errors()):
            self._agent.deregister_memory(self._memory)
        self._memory = None


class FileAgent:
    """NIXL's POSIX plugin between one memory range and one open file. Its owner has a lock. A
    FileAgent has no peers, so it may be destroyed, unlike agents with UCX. But its destructor
    aborts the process if the kernel still works on a transfer."""

    def __init__(self, address: int, size_bytes: int, descriptor: int, file_bytes: int) -> None:
        self._address, self._descriptor = address, descriptor
        self._name = f"file-{os.getpid()}-{secrets.token_hex(4)}"
        agent = _bare_agent(self._name, has_progress_thread=False)
        try:
            # uses libaio or io_uring, whichever works on this host
            agent.create_backend("POSIX", {})
            regions = [
                agent.register_memory([(address, size_bytes, 0, "")], "DRAM"),
                agent.register_memory([(0, file_bytes, descriptor, "")], "FILE"),
            ]
        except nixl_errors() as error:
            raise NixlUnavailable(f"NIXL's POSIX plugin does not work here: {error}") from error
        self._agent: Any = agent
        self._regions: list[Any] = regions

    def post(self, operation: str, rows: npt.NDArray[np.uint64]) -> Any:
        """Start a "READ" (file to memory) or "WRITE" of rows (memory offset, file offset, bytes).
        Returns a handle for is_done()."""
        memory = np.empty((len(rows), 3), np.uint64)
        memory[:, 0] = rows[:, 0] + np.uint64(self._address)
        memory[:, 1], memory[:, 2] = rows[:, 2], 0
        file = np.empty((len(rows), 3), np.uint64)
        file[:, 0], file[:, 1], file[:, 2] = rows[:, 1], rows[:, 2], self._descriptor
        try:
            handle = self._agent.initialize_xfer(
                operation,
                self._agent.get_xfer_descs(memory, "DRAM"),
                self._agent.get_xfer_descs(file, "FILE"),
                self._name,
            )
            if self._agent.transfer(handle) == "ERR":
                raise TransferFailed(f"NIXL's POSIX plugin refuses a {operation}")
        except nixl_errors() as error:
            raise TransferFailed(f"NIXL's POSIX plugin: {operation}: {error}") from error
        return handle

    def is_done(self, handle: Any) -> bool:
        """True: complete, and the handle is released. Raises TransferFailed, without an errno."""
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                return False
            self._agent.release_xfer_handle(handle)
        except nixl_errors() as error:
            raise TransferFailed(f"NIXL's POSIX plugin: {error}") from error
        if state != "DONE":
            raise TransferFailed("NIXL's POSIX plugin reports ERR")
        return True

    def has_ended(self, handle: Any) -> bool:
        """True: nothing is in flight, and the handle is released. The transfer may have failed."""
        with contextlib.suppress(*nixl_errors()):
            if self._agent.check_xfer_state(handle) == "PROC":
                return False
        try:
            self._agent.release_xfer_handle(handle)
        except nixl_errors():  # a part failed, and the kernel still works on the rest
            return False
        return True

    def close(self) -> None:
        """Deregister memory and file. A second call has no effect."""
        regions, self._regions = self._regions, []
        for region in regions:
            with contextlib.suppress(*nixl_errors()):
                self._agent.deregister_memory(region)
        self._agent = None
