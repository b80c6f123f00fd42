"""Facts about a host become findings with remedies. Pure.

Not here: reading the facts (host_facts.py), findings of a running system (running_check.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from backends.doctor.finding import BROKEN, NOTE, OK, WARNING, Finding
from backends.doctor.host_facts import HostFacts, PackageFacts
from backends.doctor.transfer_probe import ProbedWay

PYTHON_MIN, PYTHON_END = (3, 10), (3, 14)
PAGE_BYTES = 4096  # size of a small page
FILES_WANTED, FILES_MIN = 4096, 256  # descriptors; each client, worker and node takes a few
RATE_WANTED = 200e6  # bytes per second from another node; slower fetches hardly pay
NIXL_OVER_TCP_MIN = 1.2  # NIXL's rate over TCP's on one host; measured: 1.2 to 4
SKEW_S_MAX = 2.0  # clocks are read from HTTP dates, which have whole seconds
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(;.*extra.*)?")
BOUND = re.compile(r"(>=|==|<=|<|>|!=|~=)\s*([0-9][0-9.]*)")


def host_findings(facts: HostFacts, ways: Sequence[ProbedWay]) -> Iterator[Finding]:
    yield from version_findings(facts)
    yield from torch_findings(facts)
    yield from native_findings(facts)
    yield from shm_findings(facts)
    yield from limit_findings(facts)
    yield from clock_findings(facts)
    yield from path_findings(ways)


def version_findings(facts: HostFacts) -> Iterator[Finding]:
    said = ".".join(map(str, facts.python))
    if not PYTHON_MIN <= facts.python[:2] < PYTHON_END:
        yield Finding("python", BROKEN, said, "use Python 3.10 to 3.13")
    else:
        yield Finding("python", OK, said)
    if facts.triton_problem:
        yield Finding(
            "triton",
            BROKEN,
            facts.triton_problem,
            "install it with the extra `bundled`, or run inside a tritonserver image",
        )
    else:
        yield Finding("triton", OK, facts.triton)
    for package in facts.packages:
        wrong = unmet(package)
        if not package.version and package.is_extra:
            yield Finding(
                package.name,
                NOTE,
                "is not installed",
                f"an extra; only who needs it installs it ({package.requirement})",
            )
        elif not package.version:
            yield Finding(
                package.name, BROKEN, "is not installed", f"pip install '{package.requirement}'"
            )
        elif wrong:
            yield Finding(
                package.name,
                BROKEN,
                f"{package.version}, which is not {wrong}",
                f"pip install '{package.name}{wrong}'",
            )
        else:
            yield Finding(package.name, OK, package.version)


def unmet(package: PackageFacts) -> str:
    """The first bound of the requirement that the version violates; "" if it meets all."""
    found = REQUIREMENT.match(package.requirement)
    have = _numbers(package.version)
    for sign, bound in BOUND.findall(found[2] if found else ""):
        wanted = _numbers(bound)
        width = max(len(have), len(wanted))
        a, b = (each + (0,) * (width - len(each)) for each in (have, wanted))
        holds = {
            ">=": a >= b,
            "==": a == b,
            "<=": a <= b,
            "<": a < b,
            ">": a > b,
            "!=": a != b,
            "~=": a >= b,
        }[sign]
        if package.version and not holds:
            return f"{sign}{bound}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The release without its local part: (2, 13, 0) of 2.13.0+cpu."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def torch_findings(facts: HostFacts) -> Iterator[Finding]:
    """Whether torch's build suits the host and the model repository."""
    if not facts.torch:
        if facts.devices:
            yield Finding(
                "torch",
                BROKEN,
                "is not installed, and workers use the engine torch",
                "install the extra `torch`",
            )
        return
    if facts.torch_cuda and not facts.gpus:
        yield Finding(
            "torch build",
            WARNING,
            f"torch {facts.torch} is built for CUDA {facts.torch_cuda}, "
            "and this host has no GPU: gigabytes on disk that nothing uses",
            "install torch's build for CPUs, in an environment of its own so that its NVIDIA "
            "packages are not left behind",
        )
    elif facts.gpus and not facts.torch_cuda:
        yield Finding(
            "torch build",
            WARNING,
            f"{facts.gpus} GPU(s) here, and torch {facts.torch} is built "
            "for CPUs: no worker can use them",
            "install torch's build for CUDA",
        )
    else:
        kind = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPUs"
        yield Finding("torch build", OK, f"for {kind}, {facts.gpus} GPU(s) here")
    for model, device in facts.devices.items():
        if device.startswith("cuda") and not (facts.gpus and facts.torch_cuda):
            yield Finding(
                "device",
                BROKEN,
                f"{model} computes on {device}, which is not here",
                f"mooncake config set {model}.device=cpu",
            )


def native_findings(facts: HostFacts) -> Iterator[Finding]:
    """Whether native code is compiled. Without native code results are equal, but slower."""
    if not facts.native_problem:
        yield Finding("compiled code", OK, "made for this CPU")
        return
    yield Finding(
        "compiled code",
        WARNING,
        f"{facts.native_problem}; Python does its work, with the same results and slower",
        "install a C compiler (Debian: apt install gcc libc6-dev), or point CC at one",
    )


def shm_findings(facts: HostFacts) -> Iterator[Finding]:
    """The size of /dev/shm. environment.py checks the room that a start needs."""
    size, free = facts.shm_bytes / 2**20, facts.shm_free_bytes / 2**20
    said = f"{size:.0f} MiB, {free:.0f} MiB free"
    if facts.shm_bytes and facts.shm_bytes < 2**30:
        yield Finding(
            "/dev/shm",
            WARNING,
            f"{said}: too small for the default sizes",
            "enlarge it (docker: --shm-size=4g; else mount -o remount,size=4G /dev/shm), "
            "or serve with a lower --store-bytes",
        )
    else:
        yield Finding("/dev/shm", OK, said)
    yield from page_findings(facts)
    if facts.memory_free_bytes and facts.shm_needed_bytes > facts.memory_free_bytes:
        yield Finding(
            "memory",
            WARNING,
            f"{facts.memory_free_bytes / 2**20:.0f} MiB are available, and "
            f"storage nodes take {facts.shm_needed_bytes / 2**20:.0f} MiB of it",
            "lower --store-bytes, or end what uses it",
        )


def page_findings(facts: HostFacts) -> Iterator[Finding]:
    """The page size of the storage nodes' memory: GPUs and network cards lock each page."""
    if facts.shm_huge:
        yield Finding("huge pages", OK, f"/dev/shm has them (huge={facts.shm_huge})")
    elif facts.gpus or facts.has_rdma:
        pages = facts.shm_needed_bytes // PAGE_BYTES
        yield Finding(
            "huge pages",
            NOTE,
            f"/dev/shm has none: {pages} pages of the storage nodes are locked one by one",
            "mount -o remount,huge=advise /dev/shm, before storage nodes start",
        )
    else:
        yield Finding("huge pages", OK, "none in /dev/shm, and no card here locks pages")
    if facts.numa_nodes > 1:
        yield Finding(
            "NUMA",
            NOTE,
            f"{facts.numa_nodes} nodes: a GPU or card reads memory of the other slower",
            "a storage node per NUMA node, each with --segment-numa and workers on GPUs beside it",
        )


def limit_findings(facts: HostFacts) -> Iterator[Finding]:
    if facts.files_max < FILES_MIN:
        yield Finding(
            "open files",
            BROKEN,
            f"at most {facts.files_max}",
            f"ulimit -n {FILES_WANTED} (systemd: LimitNOFILE=)",
        )
    elif facts.files_max < FILES_WANTED:
        yield Finding(
            "open files",
            NOTE,
            f"at most {facts.files_max}: some hundred clients",
            f"ulimit -n {FILES_WANTED} (systemd: LimitNOFILE=) for more",
        )
    else:
        yield Finding("open files", OK, f"at most {facts.files_max}")
    if facts.has_rdma and facts.locked_bytes_max < facts.shm_needed_bytes:
        yield Finding(
            "locked memory",
            BROKEN,
            f"at most {facts.locked_bytes_max} bytes, and RDMA locks the "
            f"{facts.shm_needed_bytes} of the storage nodes",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)",
        )
    if facts.threads > facts.cores:
        yield Finding(
            "cores",
            NOTE,
            f"workers compute with {facts.threads} threads on "
            f"{facts.cores} core(s): they slow each other down",
            "fewer workers, or a lower `threads` of each",
        )
    else:
        yield Finding("cores", OK, f"{facts.cores}, workers compute with {facts.threads} threads")


def clock_findings(facts: HostFacts) -> Iterator[Finding]:
    if facts.is_clock_synchronised is False:
        yield Finding(
            "clock",
            NOTE,
            "the kernel reports it as not synchronised",
            "run chrony or ntpd where several hosts serve: certificates and logs need equal clocks",
        )
    elif facts.is_clock_synchronised:
        yield Finding("clock", OK, "synchronised")


def skew_findings(skews_s: Mapping[str, float]) -> Iterator[Finding]:
    """`skews_s`: address -> seconds that its clock is ahead of ours."""
    for address, skew_s in skews_s.items():
        if abs(skew_s) > SKEW_S_MAX:
            yield Finding(
                "clock",
                WARNING,
                f"that of {address} is {abs(skew_s):.0f} s "
                f"{'ahead of' if skew_s > 0 else 'behind'} this host's",
                "synchronise both (chrony, ntpd)",
            )


def path_findings(ways: Sequence[ProbedWay]) -> Iterator[Finding]:
    """Findings of reads between two storage nodes of this host."""
    rates = {way.transport: way.bytes_per_s for way in ways if not way.problem}
    for way in ways:
        subject = f"path {way.transport}"
        said = f"{way.bytes_per_s / 1e9:.2f} GB/s, {way.latency_s * 1e6:.0f} us for a small read"
        if way.problem and way.transport == "nixl":
            yield Finding(
                subject,
                WARNING,
                f"does not work: {way.problem}",
                "without it other nodes are read by plain TCP; install `nixl`, and see "
                "what the message asks for",
            )
        elif way.problem:
            yield Finding(
                subject,
                BROKEN,
                f"does not work: {way.problem}",
                "see the message; storage nodes must be reachable that way",
            )
        elif way.bytes_per_s < RATE_WANTED:
            yield Finding(
                subject,
                WARNING,
                f"{said}: computing a prefix may be faster",
                "stop other load on this machine, and run it again",
            )
        elif way.transport == "nixl" and _is_no_faster(way.bytes_per_s, rates.get("tcp", 0.0)):
            yield Finding(
                subject,
                NOTE,
                f"{said}, hardly faster than TCP: processes may not be able to copy "
                "from each other",
                "run them as one user, in one PID and IPC namespace (containers: --pid=host "
                "--ipc=host), see kernel.yama.ptrace_scope; on a busy machine look again",
            )
        else:
            yield Finding(subject, OK, said)


def _is_no_faster(rate: float, tcp_rate: float) -> bool:
    return rate < NIXL_OVER_TCP_MIN * tcp_rate
