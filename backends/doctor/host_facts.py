"""Facts about this host that matter for serving. Reading them imports neither torch nor NIXL.

Not here: findings (judgement.py), the checks before a start (backends/launcher/environment.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from backends.launcher.environment import EnvironmentProblem, find_triton
from mooncake_store.memory.segment import numa_nodes
from mooncake_store.native import library as native
from mooncake_store.process.available_memory import memory_available_bytes
from mooncake_store.transports.nixl_agent import has_rdma

DISTRIBUTION = "mooncake-triton"
# The packages that `mooncake doctor` lists. Other required packages are small or come with these.
SHOWN = (
    "torch",
    "numpy",
    "nixl-cu13",
    "nixl-cu12",
    "tritonclient",
    "nvidia-pytriton",
    "pyzmq",
    "grpcio",
)
INSTEAD = "nixl-cu12"  # an alternative to nixl-cu13; it is listed only if it is installed
TIME_ERROR = 5  # adjtimex(2) returns this if the clock is not synchronised
TIMEX_BYTES = 512  # size of the buffer for a struct timex, which is smaller
TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PackageFacts:
    name: str
    version: str  # "": not installed
    requirement: str  # from pyproject.toml, without its marker ("; extra == ...")
    is_extra: bool = False  # True if only an extra requires it


@dataclass(frozen=True, slots=True)
class HostFacts:
    python: tuple[int, ...]
    packages: tuple[PackageFacts, ...] = ()
    triton: str = ""  # path of tritonserver; "": not found
    triton_problem: str = ""  # why tritonserver was not found; "": it was found
    torch: str = ""  # version; "": not installed
    torch_cuda: str = ""  # CUDA version of the build; "": a build for CPUs
    gpus: int = 0  # number of NVIDIA GPUs
    devices: Mapping[str, str] = field(default_factory=dict)  # worker with engine torch -> device
    shm_bytes: int = 0  # size of /dev/shm
    shm_free_bytes: int = 0
    shm_needed_bytes: int = 0  # room in /dev/shm that the next start needs; 0 while a system runs
    shm_huge: str = ""  # mount option `huge` of /dev/shm: always, within_size, advise; "": never
    numa_nodes: int = 1  # NUMA nodes with memory
    memory_free_bytes: int = 0  # available memory; 0: unknown
    files_max: int = 0  # soft limit of open files; sys.maxsize: no limit
    locked_bytes_max: int = 0  # soft limit of locked memory; sys.maxsize: no limit
    has_rdma: bool = False
    cores: int = 1  # CPU cores that this process may use
    threads: int = 0  # CPU threads of the engines of all workers
    is_clock_synchronised: bool | None = None  # None: unknown
    native_problem: str = ""  # why native code is not compiled; "": it is compiled


def read_host(devices: Mapping[str, str], threads: int, shm_needed_bytes: int) -> HostFacts:
    """Read all facts. The arguments are the fields of the same names in HostFacts."""
    shm = os.statvfs("/dev/shm")
    triton, problem = "", ""
    try:
        triton = str(find_triton().server)
    except EnvironmentProblem as error:
        problem = str(error)
    torch, cuda = torch_build()
    return HostFacts(
        python=sys.version_info[:3],
        packages=packages(),
        triton=triton,
        triton_problem=problem,
        torch=torch,
        torch_cuda=cuda,
        gpus=gpus(),
        devices=devices,
        shm_bytes=shm.f_blocks * shm.f_frsize,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
        shm_needed_bytes=shm_needed_bytes,
        shm_huge=shm_huge(),
        numa_nodes=len(numa_nodes()) or 1,
        memory_free_bytes=memory_free_bytes(),
        files_max=_soft_limit(resource.RLIMIT_NOFILE),
        locked_bytes_max=_soft_limit(resource.RLIMIT_MEMLOCK),
        has_rdma=has_rdma(),
        cores=len(os.sched_getaffinity(0)),
        threads=threads,
        is_clock_synchronised=is_clock_synchronised(),
        native_problem=native.why_not(),
    )


def packages() -> tuple[PackageFacts, ...]:
    """The packages of SHOWN that DISTRIBUTION requires; () if DISTRIBUTION is not installed."""
    found: dict[str, PackageFacts] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires(DISTRIBUTION) or []:
            needed, _, condition = line.partition(";")
            name = Requirement(needed).name
            if name in SHOWN and name not in found:
                facts = PackageFacts(name, _version(name), needed.strip(), "extra" in condition)
                found[name] = facts
    shown = [found[name] for name in SHOWN if name in found]
    return tuple(each for each in shown if each.version or each.name != INSTEAD)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def torch_build() -> tuple[str, str]:
    """(version, CUDA version) of torch, each "" for none. Does not import torch, which is slow."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "", ""
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    except OSError:
        return _version("torch"), ""
    found = TORCH_CUDA.search(text)
    return _version("torch"), found[1] if found else ""


def gpus() -> int:
    """The number of NVIDIA GPUs that this host or container can use."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()])


def shm_huge(mounts: Path = Path("/proc/mounts")) -> str:
    """The mount option `huge` of /dev/shm; "" if it is `never` or missing."""
    found = ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text("utf-8", "replace").splitlines():
            _, point, _, options, *_ = line.split()
            if point == "/dev/shm":
                named = dict(option.partition("=")[::2] for option in options.split(","))
                found = named.get("huge", "").replace("never", "")
    return found


def memory_free_bytes() -> int:
    try:
        return memory_available_bytes()
    except OSError:
        return 0


def is_clock_synchronised() -> bool | None:
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def _soft_limit(which: int) -> int:
    """The soft limit of an RLIMIT_* resource; sys.maxsize if there is no limit."""
    soft = resource.getrlimit(which)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
