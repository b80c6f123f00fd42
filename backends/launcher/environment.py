"""Is this machine fit to serve? Every reason why not, each with the remedy.

Here: finding `tritonserver`, and the checks made before anything is started (numpy, libpython,
ports, /dev/shm, threads). Not here: copying files and starting things (launch.py).
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import locale
import os
import random
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.extras import install_line

STATE_BYTES_MIN = 16 * 2**20  # free space of a state folder: staged backends and first logs
# For ports that we choose: below what the kernel gives to outgoing connections, which could take
# one of them before the server listens.
PORT_MIN, PORT_MAX = 10_240, 20_000
OF_A_SHELL = re.compile(r"""[\s'"\\$`;&|<>()*?!#~\[\]{}]""")  # what one does not leave as it is


class EnvironmentProblem(Exception):
    """This machine cannot serve as asked; the message lists every reason and remedy."""


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """Where one Triton Inference Server lies."""

    server: Path  # the tritonserver binary
    python_backend: Path  # folder with libtriton_python.so and triton_python_backend_utils.py
    stub: Path  # triton_python_backend_stub for the running Python
    library_folders: tuple[Path, ...]  # what LD_LIBRARY_PATH must hold

    @property
    def is_bundled(self) -> bool:
        return "pytriton" in self.server.parts


def find_triton() -> TritonInstall:
    """The `tritonserver` on the PATH (an NGC image), else the one inside nvidia-pytriton."""
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
    """The folder of this interpreter's shared library, which the stub must load and no other."""
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


def python_variables() -> dict[str, str]:
    """With these, child processes write their logs at once, and read and write paths as UTF-8 in
    any locale, as Triton does."""
    is_utf_8 = locale.nl_langinfo(locale.CODESET).upper() == "UTF-8"
    return {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"} | (
        {} if is_utf_8 else {"LC_ALL": "C.UTF-8"}
    )


def linker_folders() -> frozenset[Path]:
    """Where the dynamic linker looks by itself, behind LD_LIBRARY_PATH."""
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    names = ("lib", "lib64", *([f"lib/{triplet}"] if triplet else []))
    return frozenset(Path(root) / name for root in ("/", "/usr") for name in names)


def problems(
    triton: TritonInstall,
    ports: Mapping[str, tuple[str, int]],
    shared_memory_bytes: int,
    threads_wanted: int,
    sizes_said: str = "--store-bytes",
    ports_said: str = "with --{}-port",
) -> Iterator[str]:
    """Every reason why serving would fail; `ports` maps a name to (address, port). The last two:
    where the operator says sizes and ports."""
    for path in (triton.server, triton.python_backend / "libtriton_python.so", triton.stub):
        if not path.exists():
            yield f"{path} is missing: this Triton has no Python backend for {sys.version[:6]}"
    numpy_major = _numpy_major()
    if triton.is_bundled and numpy_major >= 2:
        yield (
            f"numpy {numpy_major}.x is installed, but the Triton inside nvidia-pytriton loses the "
            "bytes of tensors with it. Install 'numpy<2' in this environment."
        )
    yield from _port_problems(ports, ports_said)
    free_bytes = _free_bytes(Path("/dev/shm"))
    if shared_memory_bytes > free_bytes:
        yield (
            f"/dev/shm has {free_bytes / 2**20:.0f} MiB free, but the storage nodes and Triton "
            f"need {shared_memory_bytes / 2**20:.0f} MiB. Lower {sizes_said}, free something "
            "there, or enlarge it (docker: --shm-size)."
        )
    pids_max = _pids_max()
    if pids_max is not None and pids_max < threads_wanted:
        yield (
            f"this container may have {pids_max} threads, about {threads_wanted} are needed. "
            "Raise its limit (docker: --pids-limit)."
        )


def make_writable(folder: Path, option: str) -> None:
    """Make the folder; `option` says another one."""
    if found := OF_A_SHELL.search(str(folder)):
        raise EnvironmentProblem(
            f"{folder} has a {found[0]!r} in its path, and Triton starts its Python models by a "
            f"shell, without quotes: name a folder with {option} that has none, like /tmp/mooncake"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):  # a file system can be read-only for root as well
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        disk = os.statvfs(folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < STATE_BYTES_MIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder} cannot be written ({error.strerror}): name a folder with {option} that can"
        ) from None


def free_ports(
    count: int,
    promised: Collection[int],
    port_min: int = PORT_MIN,
    port_max: int = PORT_MAX,
    host: str = "127.0.0.1",
) -> list[int]:
    """Ports of `host` that nobody has now, nor is going to take; they differ."""
    chance = random.SystemRandom()
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            listener = held.enter_context(socket.socket())
            port = chance.randrange(port_min, port_max)
            if port in promised:
                continue
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise EnvironmentProblem(f"{host}: nothing can listen there: {error}") from None
            else:
                ports.append(port)
    return ports


def _numpy_major() -> int:
    from importlib.metadata import version

    return int(version("numpy").split(".")[0])


def _port_problems(ports: Mapping[str, tuple[str, int]], said: str) -> Iterator[str]:
    seen: dict[int, str] = {}
    for name, (address, port) in ports.items():
        if port in seen:
            yield f"{name} and {seen[port]} both want port {port}; give each its own"
        seen[port] = name
        if not 0 < port < 65536:
            yield f"{name} port {port} is not between 1 and 65535"
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    yield (
                        f"{name} port {address}:{port} cannot be used: this machine has no address "
                        f"{address}. Name one that it has, or serve this on the host that has it."
                    )
                    continue
                yield (
                    f"{name} port {address}:{port} cannot be used ({error.strerror}). Stop what "
                    f"listens there, or choose another {said.format(name)}."
                )


def _free_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _pids_max() -> int | None:
    """The container's limit of tasks, or None where there is none."""
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return None if text == "max" else int(text)
    return None
