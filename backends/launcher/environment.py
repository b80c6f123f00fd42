"""Checks the machine before a launch, and reports each problem with its remedy.

This module finds `tritonserver`, checks numpy, libpython, ports, /dev/shm and the thread limit, and
makes the environment of child processes.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import locale
import os
import platform
import random
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from backends.extras import install_line

STATE_BYTES_MIN = 16 * 2**20  # free disk space for copies of Triton's backends and the first logs
# A launch chooses ports p with PORT_MIN <= p < PORT_MAX. The range is below the kernel's default
# range for outgoing connections, which could take a chosen port before the server listens.
PORT_MIN, PORT_MAX = 10_240, 20_000
# Variables that child processes do not inherit. The plan of a launch sets them where needed.
OF_A_HOST = ("MOONCAKE_ADDRESS", "MOONCAKE_LISTEN", "MOONCAKE_PEERS")
OF_A_SHELL = re.compile(r"""[\s'"\\$`;&|<>()*?!#~\[\]{}]""")  # characters that a shell interprets


class EnvironmentProblem(Exception):
    """This machine cannot serve with these options. The message has the reasons and remedies."""


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """The paths of one Triton Inference Server."""

    server: Path  # the tritonserver binary
    python_backend: Path  # folder with libtriton_python.so and triton_python_backend_utils.py
    stub: Path  # executable that runs Python models, for the Python version of this process
    library_folders: tuple[Path, ...]  # folders that LD_LIBRARY_PATH must contain

    @property
    def is_bundled(self) -> bool:
        return "pytriton" in self.server.parts


def find_triton() -> TritonInstall:
    """The `tritonserver` on the PATH (an NGC image), or else the one inside nvidia-pytriton. Raises
    EnvironmentProblem if there is neither. `problems` checks whether its files exist."""
    on_path = shutil.which("tritonserver")
    if on_path:
        server = Path(on_path).resolve()
        backend = server.parent.parent / "backends" / "python"
        return TritonInstall(server, backend, backend / "triton_python_backend_stub", ())
    found = importlib.util.find_spec("pytriton")
    if found is None or not found.submodule_search_locations:
        raise EnvironmentProblem(
            "no tritonserver: it is not on the PATH and nvidia-pytriton is not installed. "
            f"Run inside an NGC tritonserver image, or {install_line('bundled')}"
        )
    package = Path(found.submodule_search_locations[0])
    home = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    return TritonInstall(
        server=home / "bin" / "tritonserver",
        python_backend=home / "backends" / "python",
        stub=stub,
        library_folders=(package.parent / "nvidia_pytriton.libs",),
    )


def libpython_folder() -> Path:
    """The folder of this interpreter's shared libpython. Raises EnvironmentProblem without one."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    base = Path(sys.base_prefix)
    candidates = [Path(sysconfig.get_config_var("LIBDIR") or ""), base / "lib", base / "lib64"]
    for folder in candidates:
        if name.startswith("libpython") and (folder / name).exists():
            return folder
    raise EnvironmentProblem(
        f"Python at {sys.executable} has no shared libpython ({name or 'built static'}), which "
        "Triton's Python stub needs. Use a Python built with --enable-shared (Debian's, pyenv's "
        "with PYTHON_CONFIGURE_OPTS=--enable-shared, conda's)."
    )


def process_environment(triton: TritonInstall, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of all child processes: that of this process, overridden by `given`. Python
    children write logs unbuffered, and use UTF-8 for paths in every locale, as Triton does."""
    env = {name: value for name, value in os.environ.items() if name not in OF_A_HOST}
    env.update(given)
    # The linker's default folders are left out, because in LD_LIBRARY_PATH they would take
    # precedence over the folders that an NGC image configures.
    libraries = [
        str(each)
        for each in (libpython_folder(), *triton.library_folders)
        if each not in linker_folders()
    ]
    if before := env.get("LD_LIBRARY_PATH"):
        libraries.append(before)
    env["LD_LIBRARY_PATH"] = ":".join(libraries)
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    if locale.nl_langinfo(locale.CODESET).upper() != "UTF-8":
        env["LC_ALL"] = "C.UTF-8"
    # By default, glibc makes up to 8 arenas per core, and each of them keeps freed memory.
    env.setdefault("MALLOC_ARENA_MAX", "2")
    env.pop("PYTHONHOME", None)
    return env


def linker_folders() -> frozenset[Path]:
    """The folders that the dynamic linker searches by default, after those of LD_LIBRARY_PATH."""
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    names = ("lib", "lib64", *([f"lib/{triplet}"] if triplet else []))
    return frozenset(Path(root) / name for root in ("/", "/usr") for name in names)


def problems(
    triton: TritonInstall,
    ports: Mapping[str, tuple[str, int]],
    shared_memory_bytes: int,
    threads_wanted: int,
    size_source: str = "--store-bytes",
    port_source: str = "with --{}-port",
) -> Iterator[str]:
    """Every problem of this machine with its remedy. `ports` maps a name to (address, port).
    `size_source` and `port_source`: where the operator sets sizes and ports."""
    for path in (triton.server, triton.python_backend / "libtriton_python.so", triton.stub):
        if not path.exists():
            yield f"{path} is missing: Triton needs it for Python {platform.python_version()}"
    numpy_major = int(version("numpy").split(".")[0])
    if triton.is_bundled and numpy_major >= 2:
        yield (
            f"numpy {numpy_major}.x is installed, with which the Triton inside nvidia-pytriton "
            "loses the bytes of tensors. Install 'numpy<2' in this environment."
        )
    yield from _port_problems(ports, port_source)
    free_bytes = shutil.disk_usage("/dev/shm").free
    if shared_memory_bytes > free_bytes:
        yield (
            f"/dev/shm has {free_bytes / 2**20:.0f} MiB free, but the storage nodes and Triton "
            f"need {shared_memory_bytes / 2**20:.0f} MiB. Lower {size_source}, remove files "
            "there, or enlarge /dev/shm (docker: --shm-size)."
        )
    pids_max = _pids_max()
    if pids_max is not None and pids_max < threads_wanted:
        yield (
            f"this container may have {pids_max} threads, but about {threads_wanted} are needed. "
            "Raise the limit (docker: --pids-limit)."
        )


def make_writable(folder: Path, option: str) -> None:
    """Make the folder. Raises EnvironmentProblem if a shell would change its path, if it is not
    writable, or if the disk is full. The message names `option`, which chooses another folder."""
    if found := OF_A_SHELL.search(str(folder)):
        raise EnvironmentProblem(
            f"the path {folder} contains {found[0]!r}, but Triton starts Python models by a shell "
            f"without quoting the path. Choose another path with {option}, such as /tmp/mooncake"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):  # even root cannot write to a read-only file system
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        disk = shutil.disk_usage(folder)
        if disk.total and disk.free < STATE_BYTES_MIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder} cannot be written ({error.strerror}): name another folder with {option}"
        ) from None


def free_ports(
    count: int,
    promised: Collection[int],
    port_min: int = PORT_MIN,
    port_max: int = PORT_MAX,
    host: str = "127.0.0.1",
) -> list[int]:
    """`count` distinct free ports p of `host`, port_min <= p < port_max, without those `promised`
    to other processes. Raises EnvironmentProblem if the range has too few free ports, or if
    processes cannot listen at the address `host`."""
    rng = random.SystemRandom()
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in rng.sample(range(port_min, port_max), port_max - port_min):
            if len(ports) == count:
                break
            if port in promised:
                continue
            listener = held.enter_context(socket.socket())
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise EnvironmentProblem(f"no process can listen on {host}: {error}") from None
            else:
                ports.append(port)
    if len(ports) < count:
        raise EnvironmentProblem(
            f"{count} free ports of {host} from {port_min} to {port_max - 1} are needed, and "
            f"{len(ports)} are free: end other processes, or use another range"
        )
    return ports


def _port_problems(ports: Mapping[str, tuple[str, int]], source: str) -> Iterator[str]:
    seen: dict[int, str] = {}
    for name, (address, port) in ports.items():
        if port in seen:
            yield f"{name} and {seen[port]} both use port {port}; give each its own"
        seen[port] = name
        if not 0 < port < 65536:
            yield f"{name} port {port} is not between 1 and 65535"
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                what = f"{name} port {address}:{port} cannot be used"
                if error.errno == errno.EADDRNOTAVAIL:
                    remedy = "Name one that it has, or serve this on the host that has it."
                    yield f"{what}: this machine has no address {address}. {remedy}"
                else:
                    remedy = f"Set another {source.format(name)}, or end the process that uses it."
                    yield f"{what} ({error.strerror}). {remedy}"


def _pids_max() -> int | None:
    """The container's limit of processes and threads; None if there is none or it is unknown."""
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return None if text == "max" else int(text)
    return None
