"""Turns facts about a host into findings with remedies. Pure.

Not here: reading the facts (host_facts.py), findings about a running system (running_check.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from backends.doctor.host_facts import HostFacts, PackageFacts
from backends.doctor.transfer_probe import ProbedWay
from backends.doctor.vllm_interpreter import VllmInterpreter
from backends.engine.interpreter import VLLM_SUPPORTED

OK, NOTE, WARNING, BROKEN = "ok", "note", "warning", "BROKEN"
PYTHON_MIN, PYTHON_END = (3, 10), (3, 14)  # first supported, first unsupported version
PAGE_BYTES = 4096  # size of a memory page that is not a huge page
FILES_WANTED, FILES_MIN = 4096, 256  # recommended and least limit of open files
RATE_WANTED = 200e6  # bytes/s; below this read rate, computing KV may be faster than reading it
NIXL_OVER_TCP_MIN = 1.2  # least normal rate of NIXL / rate of TCP on one host; measured: 1.2 to 4
SKEW_S_MAX = 2.0  # tolerated clock difference; HTTP dates, which show it, have whole seconds


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
                f"optional; if you need it: pip install '{package.requirement}'",
            )
        elif not package.version:
            yield broken(package.name, "is not installed", f"pip install '{package.requirement}'")
        elif wrong:
            yield broken(
                package.name,
                f"{package.version} is installed, but {wrong} is required",
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
            "but this host has no GPU, so gigabytes of CUDA libraries are unused",
            "install torch's build for CPUs in a new environment, because pip would not remove the "
            "NVIDIA packages",
        )
    elif facts.gpus and not facts.torch_cuda:
        yield warning(
            "torch build",
            f"this host has {facts.gpus} GPU(s), but torch {facts.torch} is built "
            "for CPUs, so no worker can use them",
            "install torch's build for CUDA",
        )
    else:
        kind = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPUs"
        yield Finding("torch build", f"for {kind}; this host has {facts.gpus} GPU(s)")
    for model, device in facts.devices.items():
        if device.startswith("cuda") and not (facts.gpus and facts.torch_cuda):
            yield broken(
                "device",
                f"{model} is set to compute on {device}, which torch cannot use here",
                f"mooncake config set {model}.device=cpu",
            )


def vllm_findings(interpreters: Sequence[VllmInterpreter]) -> Iterator[Finding]:
    """Whether the interpreters of the workers with the engine vllm can run it."""
    for each in interpreters:
        said = f"{each.python} of {', '.join(each.workers)}"
        if each.problem:
            yield broken(
                "vllm",
                f"{said}: {each.problem}",
                "`make vllm` makes an environment for CPUs; or set the parameter engine_python to "
                "an interpreter that has vLLM",
            )
            continue
        wrong = not SpecifierSet(VLLM_SUPPORTED).contains(each.version, prereleases=True)
        if wrong:
            yield broken(
                "vllm",
                f"{said} has vLLM {each.version}, but {VLLM_SUPPORTED} is required",
                "`make vllm` makes an environment with a supported version, for CPUs; on GPUs: "
                f"{each.python} -m pip install 'vllm{VLLM_SUPPORTED}'",
            )
        if each.missing:
            yield broken(
                "vllm",
                f"{said} lacks {', '.join(each.missing)}, which the connector needs",
                f"`make vllm`, or {each.python} -m pip install {' '.join(each.missing)}",
            )
        if not wrong and not each.missing:
            yield Finding("vllm", f"{said} has vLLM {each.version}")


def native_findings(facts: HostFacts) -> Iterator[Finding]:
    """Whether native.c is compiled, which computes the same results as Python, but faster."""
    if not facts.native_problem:
        yield Finding("compiled code", "made for this CPU")
        return
    yield warning(
        "compiled code",
        f"{facts.native_problem}; Python computes the same results, but more slowly",
        "install a C compiler (Debian: apt install gcc libc6-dev), or point CC at one",
    )


def shm_findings(facts: HostFacts) -> Iterator[Finding]:
    """Findings about /dev/shm and memory. command.py checks the room for the next start."""
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
            f"{facts.memory_free_bytes / 2**20:.0f} MiB are available, but "
            f"the next start needs {facts.shm_needed_bytes / 2**20:.0f} MiB",
            "lower --store-bytes, or end processes that use memory",
        )


def page_findings(facts: HostFacts) -> Iterator[Finding]:
    """GPUs and RDMA cards lock the storage nodes' memory page by page. Huge pages save time."""
    if facts.shm_huge:
        yield Finding("huge pages", f"/dev/shm has them (huge={facts.shm_huge})")
    elif facts.gpus or facts.has_rdma:
        pages = facts.shm_needed_bytes // PAGE_BYTES
        yield note(
            "huge pages",
            f"/dev/shm has none, so {pages} pages of the storage nodes are locked one by one",
            "mount -o remount,huge=advise /dev/shm, before storage nodes start",
        )
    else:
        yield Finding("huge pages", "none in /dev/shm; without GPU and RDMA card none are needed")
    if facts.numa_nodes > 1:
        yield note(
            "NUMA",
            f"{facts.numa_nodes} nodes; a device reads the memory of another node more slowly",
            "use one storage node per NUMA node, with --segment-numa and workers on its GPUs",
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
            f"at most {facts.files_max}, enough for some hundred clients",
            f"ulimit -n {FILES_WANTED} (systemd: LimitNOFILE=) for more",
        )
    else:
        yield Finding("open files", f"at most {facts.files_max}")
    if facts.has_rdma and facts.locked_bytes_max < facts.shm_needed_bytes:
        yield broken(
            "locked memory",
            f"at most {facts.locked_bytes_max} bytes, but RDMA locks the "
            f"{facts.shm_needed_bytes} bytes of the storage nodes",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)",
        )
    if facts.threads > facts.cores:
        yield note(
            "cores",
            f"workers compute with {facts.threads} threads on "
            f"{facts.cores} core(s), so they slow each other down",
            "use fewer workers, or lower their parameter `threads`",
        )
    else:
        yield Finding("cores", f"{facts.cores}, workers compute with {facts.threads} threads")


def clock_findings(facts: HostFacts) -> Iterator[Finding]:
    if facts.is_clock_synchronised is False:
        yield note(
            "clock",
            "the kernel reports that the clock is not synchronised",
            "if several hosts serve, run chrony or ntpd: certificates and logs need equal clocks",
        )
    elif facts.is_clock_synchronised:
        yield Finding("clock", "synchronised")


def skew_findings(address: str, skew_s: float) -> Iterator[Finding]:
    """`skew_s`: clock of `address` minus clock of this host, in seconds."""
    if abs(skew_s) > SKEW_S_MAX:
        side = "ahead of" if skew_s > 0 else "behind"
        what = f"the clock of {address} is {abs(skew_s):.0f} s {side} this host's"
        yield warning("clock", what, "synchronise both (chrony, ntpd)")


def path_findings(ways: Sequence[ProbedWay]) -> Iterator[Finding]:
    """`ways`: reads between two storage nodes of this host, one for each transport. If the probe
    failed as a whole, the only entry has the transport `any`."""
    tcp_rate = max((way.bytes_per_s for way in ways if way.transport == "tcp"), default=0.0)
    for way in ways:
        subject = f"path {way.transport}"
        said = f"{way.bytes_per_s / 1e9:.2f} GB/s, {way.latency_s * 1e6:.0f} us for a small read"
        if way.problem and way.transport == "nixl":
            yield warning(
                subject,
                f"does not work: {way.problem}",
                "without NIXL, other nodes are read by plain TCP; install `nixl`, and remedy the "
                "cause in the message",
            )
        elif way.problem:
            yield broken(
                subject,
                f"does not work: {way.problem}",
                "remedy the cause in the message, and run `mooncake doctor` again",
            )
        elif way.bytes_per_s < RATE_WANTED:
            yield warning(
                subject,
                f"{said}; computing a prefix may be faster than reading its KV",
                "stop other load on this machine, and run `mooncake doctor` again",
            )
        elif way.transport == "nixl" and way.bytes_per_s < NIXL_OVER_TCP_MIN * tcp_rate:
            yield note(
                subject,
                f"{said}, hardly faster than TCP; perhaps processes may not copy from each "
                "other's memory",
                "run them as one user, in one PID and IPC namespace (containers: --pid=host "
                "--ipc=host), check kernel.yama.ptrace_scope; on a busy machine measure again",
            )
        else:
            yield Finding(subject, said)
