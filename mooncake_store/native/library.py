"""Loads the project's C file as a library: compiled on first use, cached in the user's folder.

The wheel remains pure Python: it contains `native.c`, which the host's `cc` compiles for the host's
CPU, once for each version of the file. Every native function has a Python version with the same
results. On hosts without a compiler, `library()` returns None, and `why_not()` returns the reason.
MOONCAKE_NATIVE=off selects Python everywhere.

The cache folder is MOONCAKE_CACHE, else XDG_CACHE_HOME/mooncake, else ~/.cache/mooncake. A folder
in the system's temporary folder is used instead if this user cannot write there or others can. A
library that another user could have written is not loaded. While one process compiles, others wait.

Not here: the functions' arguments, which their callers declare (`function`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("native.c")
SWITCH, CACHE, COMPILER = "MOONCAKE_NATIVE", "MOONCAKE_CACHE", "CC"
# Sums and products must round as numpy's do, so -ffp-contract=off forbids fused operations.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Werror",
    # no warning that calls with wide vectors depend on AVX-512, because native.c has all such calls
    "-Wno-psabi",
)
COMPILE_S_MAX = 120.0
NativeFunction = Callable[..., Any]


class _Unusable(Exception):
    """No library can be made or loaded on this host; the message gives the reason."""


def library() -> ctypes.CDLL | None:
    """The library; None: callers must use the Python versions."""
    return _loaded()[0]


def why_not() -> str:
    """The reason why there is no library; "" if there is one."""
    return _loaded()[1]


def function(name: str, result: Any, arguments: Sequence[Any]) -> NativeFunction | None:
    """A function of native.c, which runs without the GIL; None if there is no library."""
    return _declared(library(), name, result, arguments)


def quick_function(name: str, result: Any, arguments: Sequence[Any]) -> NativeFunction | None:
    """Like `function`, but keeps the GIL, whose release takes longer than a short function."""
    found = library()
    return _declared(found and ctypes.PyDLL(found._name), name, result, arguments)


def _declared(
    found: ctypes.CDLL | None, name: str, result: Any, arguments: Sequence[Any]
) -> NativeFunction | None:
    if found is None:
        return None
    made: NativeFunction = found[name]  # a new object each time; `found.name` would be cached
    made.restype, made.argtypes = result, list(arguments)  # type: ignore[attr-defined]
    return made


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        return None, f"{SWITCH}={os.environ[SWITCH]} selects Python"
    try:
        path = _made()
        try:
            return ctypes.CDLL(str(path)), ""
        except OSError:
            if not os.statvfs(path).f_flag & os.ST_NOEXEC:
                path.unlink()  # the library is incomplete or wrong: the next process recompiles
            raise
    except (_Unusable, OSError) as error:
        return None, str(error)


def forget() -> None:
    """Read the environment again on the next use. For tests."""
    _loaded.cache_clear()


def _made() -> Path:
    """The library of this source, these flags and this CPU; compiled if it is not cached."""
    source = SOURCE.read_bytes()
    what = b"\0".join([source, " ".join(FLAGS).encode(), platform.machine().encode(), _cpu()])
    folder = cache_folder()
    path = folder / f"native-{hashlib.sha256(what).hexdigest()[:24]}.so"
    if not _is_trusted(path):
        with _alone(folder):
            if not _is_trusted(path):  # another process may have compiled it during the wait
                _compile(path)
    return path


def _cpu() -> bytes:
    """The CPU properties that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor().encode()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(kept)).encode()


def cache_folder() -> Path:
    """The first usable cache folder, created if missing."""
    base = os.environ.get(CACHE)
    if not base:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        base = os.path.join(home, "mooncake")
    shared = os.path.join(tempfile.gettempdir(), f"mooncake-{os.geteuid()}")
    for folder in (Path(base), Path(shared)):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK) and _is_ours(folder):
                return folder
    raise _Unusable(
        f"neither {base} nor {shared} is a folder that this user alone may write; set {CACHE}"
    )


def _is_ours(path: Path) -> bool:
    """True if only this user or root can write it. OSError: it does not exist."""
    found = path.stat()
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_trusted(path: Path) -> bool:
    if not path.exists():
        return False
    if not _is_ours(path):
        raise _Unusable(f"{path} could be changed by others: remove it")
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with open(folder / "compiling.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(path: Path) -> None:
    # the variable may hold arguments, as in "ccache gcc"
    wanted = os.environ.get(COMPILER, "").split() or ["cc"]
    compiler = wanted[0]
    if shutil.which(compiler) is None:
        raise _Unusable(f"no C compiler: {compiler} is not on PATH (Debian: apt install gcc)")
    made = path.with_suffix(f".{os.getpid()}")
    command = [*wanted, *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
    try:
        status, said = _run(command)
        if status:
            lines = said.strip().splitlines() or ["no message"]
            at = next((line for line in lines if "error" in line), lines[-1])
            raise _Unusable(f"{compiler} could not compile {SOURCE.name}: {at}")
        made.chmod(0o700)
        os.replace(made, path)
    except OSError as error:
        raise _Unusable(f"{compiler} could not be run: {error}") from None
    finally:
        made.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and error output. After COMPILE_S_MAX the whole process group is killed, because
    a compiler starts processes of its own."""
    running = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, said = running.communicate(timeout=COMPILE_S_MAX)
        return running.returncode, said
    except subprocess.TimeoutExpired:
        raise _Unusable(
            f"{command[0]} took longer than {COMPILE_S_MAX:g} s for {SOURCE.name}: try again when "
            "this host is less busy"
        ) from None
    finally:
        if running.returncode is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
