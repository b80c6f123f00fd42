"""Turns facts about a host into findings with remedies. Pure.

Not here: reading the facts (host_facts.py), findings about a running system (running_check.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from packaging.requirements import Requirement

from backends.doctor.host_facts import HostFacts, PackageFacts
from backends.doctor.transfer_probe import ProbedWay

OK, NOTE, WARNING, BROKEN = "ok", "note", "warning", "BROKEN"
PYTHON_MIN, PYTHON_END = (3, 10), (3, 14)  # first supported, first unsupported version
PAGE_BYTES = 4096  # size of a memory page that is not a huge page
FILES_WANTED, FILES_MIN = 4096, 256  # open files; each client, worker and node uses a few
RATE_WANTED = 200e6  # bytes/s read from another node; below it, computing KV may be faster
NIXL_OVER_TCP_MIN = 1.2  # lowest normal rate of NIXL / rate of TCP on one host; measured: 1.2 to 4
SKEW_S_MAX = 2.0  # tolerated clock difference, measured with HTTP dates of whole seconds


@dataclass(frozen=True, slots=True)
class Finding:
    """One entry in the output of `mooncake doctor`."""

    subject: str  # the checked part of the host, such as "/dev/shm"
    what: str  # the state that the check found
    remedy: str = ""  # "" only if the state is ok
    state: str = OK  # ok; note: may be intended; warning: works badly; BROKEN: does not work

    def __str__(self) -> str:
        line = f"{self.state:<8} {self.subject}: {self.what}"
        return f"{line}\n{'':<9}-> {self.remedy}" if self.remedy else line


note, warning, broken = (partial(Finding, state=state) for state in (NOTE, WARNING, BROKEN))


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
        yield broken("python", said, "use Python 3.10 to 3.13")
    else:
        yield Finding("python", said)
    if facts.triton_problem:
        yield broken(
            "triton",
            facts.triton_problem,
            "install it with the extra `bundled`, or run inside a tritonserver image",
        )
    else:
        yield Finding("triton", facts.triton)
    for package in facts.packages:
        wrong = unmet(package)
        if not package.version and package.is_extra:
            yield note(
                package.name,
                "is not installed",
                f"an extra; only who needs it installs it ({package.requirement})",
            )
        elif not package.version:
            yield broken(package.name, "is not installed", f"pip install '{package.requirement}'")
        elif wrong:
            yield broken(
                package.name,
                f"{package.version}, which is not {wrong}",
                f"pip install '{package.name}{wrong}'",
            )
        else:
            yield Finding(package.name, package.version)


def unmet(package: PackageFacts) -> str:
    """A bound of the requirement that the installed version violates; "" if it violates none."""
    bounds = Requirement(package.requirement).specifier if package.version else ()
    wrong = (str(each) for each in bounds if not each.contains(package.version, prereleases=True))
    return next(wrong, "")


def torch_findings(facts: HostFacts) -> Iterator[Finding]:
    """Whether torch's build suits the host and the model repository."""
    if not facts.torch:
        if facts.devices:
            yield broken(
                "torch",
                "is not installed, and workers use the engine torch",
                "install the extra `torch`",
            )
        return
    if facts.torch_cuda and not facts.gpus:
        yield warning(
            "torch build",
            f"torch {facts.torch} is built for CUDA {facts.torch_cuda}, "
            "and this host has no GPU: gigabytes on disk that nothing uses",
            "install torch's build for CPUs, in an environment of its own so that its NVIDIA "
            "packages are not left behind",
        )
    elif facts.gpus and not facts.torch_cuda:
        yield warning(
            "torch build",
            f"{facts.gpus} GPU(s) here, and torch {facts.torch} is built "
            "for CPUs: no worker can use them",
            "install torch's build for CUDA",
        )
    else:
        kind = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPUs"
        yield Finding("torch build", f"for {kind}, {facts.gpus} GPU(s) here")
    for model, device in facts.devices.items():
        if device.startswith("cuda") and not (facts.gpus and facts.torch_cuda):
            yield broken(
                "device",
                f"{model} computes on {device}, which is not here",
                f"mooncake config set {model}.device=cpu",
            )


def native_findings(facts: HostFacts) -> Iterator[Finding]:
    """Whether the native code is compiled. Otherwise Python computes the same results, slower."""
    if not facts.native_problem:
        yield Finding("compiled code", "made for this CPU")
        return
    yield warning(
        "compiled code",
        f"{facts.native_problem}; Python does its work, with the same results and slower",
        "install a C compiler (Debian: apt install gcc libc6-dev), or point CC at one",
    )


def shm_findings(facts: HostFacts) -> Iterator[Finding]:
    """/dev/shm, its pages, and free memory. command.py checks whether the next start fits."""
    size, free = facts.shm_bytes / 2**20, facts.shm_free_bytes / 2**20
    said = f"{size:.0f} MiB, {free:.0f} MiB free"
    if facts.shm_bytes and facts.shm_bytes < 2**30:
        yield warning(
            "/dev/shm",
            f"{said}: too small for the default sizes",
            "enlarge it (docker: --shm-size=4g; else mount -o remount,size=4G /dev/shm), "
            "or serve with a lower --store-bytes",
        )
    else:
        yield Finding("/dev/shm", said)
    yield from page_findings(facts)
    if facts.memory_free_bytes and facts.shm_needed_bytes > facts.memory_free_bytes:
        yield warning(
            "memory",
            f"{facts.memory_free_bytes / 2**20:.0f} MiB are available, and "
            f"storage nodes take {facts.shm_needed_bytes / 2**20:.0f} MiB of it",
            "lower --store-bytes, or end what uses it",
        )


def page_findings(facts: HostFacts) -> Iterator[Finding]:
    """Huge pages and NUMA. GPUs and network cards lock each page of the storage nodes' memory."""
    if facts.shm_huge:
        yield Finding("huge pages", f"/dev/shm has them (huge={facts.shm_huge})")
    elif facts.gpus or facts.has_rdma:
        pages = facts.shm_needed_bytes // PAGE_BYTES
        yield note(
            "huge pages",
            f"/dev/shm has none: {pages} pages of the storage nodes are locked one by one",
            "mount -o remount,huge=advise /dev/shm, before storage nodes start",
        )
    else:
        yield Finding("huge pages", "none in /dev/shm, and no card here locks pages")
    if facts.numa_nodes > 1:
        yield note(
            "NUMA",
            f"{facts.numa_nodes} nodes: a GPU or card reads memory of the other slower",
            "a storage node per NUMA node, each with --segment-numa and workers on GPUs beside it",
        )


def limit_findings(facts: HostFacts) -> Iterator[Finding]:
    if facts.files_max < FILES_MIN:
        yield broken(
            "open files",
            f"at most {facts.files_max}",
            f"ulimit -n {FILES_WANTED} (systemd: LimitNOFILE=)",
        )
    elif facts.files_max < FILES_WANTED:
        yield note(
            "open files",
            f"at most {facts.files_max}: some hundred clients",
            f"ulimit -n {FILES_WANTED} (systemd: LimitNOFILE=) for more",
        )
    else:
        yield Finding("open files", f"at most {facts.files_max}")
    if facts.has_rdma and facts.locked_bytes_max < facts.shm_needed_bytes:
        yield broken(
            "locked memory",
            f"at most {facts.locked_bytes_max} bytes, and RDMA locks the "
            f"{facts.shm_needed_bytes} of the storage nodes",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)",
        )
    if facts.threads > facts.cores:
        yield note(
            "cores",
            f"workers compute with {facts.threads} threads on "
            f"{facts.cores} core(s): they slow each other down",
            "fewer workers, or a lower `threads` of each",
        )
    else:
        yield Finding("cores", f"{facts.cores}, workers compute with {facts.threads} threads")


def clock_findings(facts: HostFacts) -> Iterator[Finding]:
    if facts.is_clock_synchronised is False:
        yield note(
            "clock",
            "the kernel reports it as not synchronised",
            "run chrony or ntpd where several hosts serve: certificates and logs need equal clocks",
        )
    elif facts.is_clock_synchronised:
        yield Finding("clock", "synchronised")


def skew_findings(address: str, skew_s: float) -> Iterator[Finding]:
    """`skew_s`: clock of `address` minus clock of this host, in seconds."""
    if abs(skew_s) > SKEW_S_MAX:
        side = "ahead of" if skew_s > 0 else "behind"
        what = f"that of {address} is {abs(skew_s):.0f} s {side} this host's"
        yield warning("clock", what, "synchronise both (chrony, ntpd)")


def path_findings(ways: Sequence[ProbedWay]) -> Iterator[Finding]:
    """`ways`: measured reads between two storage nodes of this host, one for each transport."""
    tcp_rate = max((way.bytes_per_s for way in ways if way.transport == "tcp"), default=0.0)
    for way in ways:
        subject = f"path {way.transport}"
        said = f"{way.bytes_per_s / 1e9:.2f} GB/s, {way.latency_s * 1e6:.0f} us for a small read"
        if way.problem and way.transport == "nixl":
            yield warning(
                subject,
                f"does not work: {way.problem}",
                "without it other nodes are read by plain TCP; install `nixl`, and see "
                "what the message asks for",
            )
        elif way.problem:
            yield broken(
                subject,
                f"does not work: {way.problem}",
                "see the message; storage nodes must be reachable that way",
            )
        elif way.bytes_per_s < RATE_WANTED:
            yield warning(
                subject,
                f"{said}: computing a prefix may be faster",
                "stop other load on this machine, and run it again",
            )
        elif way.transport == "nixl" and way.bytes_per_s < NIXL_OVER_TCP_MIN * tcp_rate:
            yield note(
                subject,
                f"{said}, hardly faster than TCP: processes may not be able to copy "
                "from each other",
                "run them as one user, in one PID and IPC namespace (containers: --pid=host "
                "--ipc=host), see kernel.yama.ptrace_scope; on a busy machine look again",
            )
        else:
            yield Finding(subject, said)
