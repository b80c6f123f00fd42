"""Parses a host's /sys: memory, network cards, accelerators, and their closeness on the bus.

A *tree* maps paths below /sys to their content: the text of a file, or "-> TARGET" for a link.
TARGET is a path below /sys too. host_topology.py reads a tree from a machine; tests/data has
recorded trees.

The closeness of two devices is what they share on the way to the CPU: a PCI switch, a host bridge,
a NUMA node, or nothing. A missing or impossible entry raises no error. It is listed in
Topology.problems, and counts as unknown.

Not here: reading files (host_topology.py), the cost of a path between hosts (path_cost.py).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NODES, NETS, RDMAS, PCIS = (
    "devices/system/node/",
    "class/net/",
    "class/infiniband/",
    "bus/pci/devices/",
)
LINK = "-> "
_PCI = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_BRIDGE = re.compile(r"^pci[0-9a-f]{4,}:[0-9a-f]{2}$")
# 3D, display and processing controllers, which have no monitor
_ACCELERATORS = ("0x0302", "0x0380", "0x1200")
_VGA = "0x0300"  # counts only for _GPU_VENDORS; a server's management chip is a VGA card too
_GPU_VENDORS = ("0x10de", "0x1002")


class Closeness(enum.IntEnum):
    """The nearest thing that two devices share; smaller is closer."""

    SWITCH = 0
    BRIDGE = 1
    NUMA = 2
    NOTHING = 3


@dataclass(frozen=True, slots=True)
class NumaNode:
    number: int  # the kernel's number
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card's port: an RDMA device, an Ethernet interface, or one that is both."""

    name: str  # of the RDMA device if there is one, else of the interface
    interface: str  # "" if the RDMA device has none
    rdma_ports: tuple[int, ...]  # active ports; () without RDMA, or if no port is active
    bits_per_s: int  # 0: not reported
    is_up: bool
    numa_node: int  # -1: unknown
    pci: tuple[str, ...]  # addresses from the host bridge to the device; (): unknown

    @property
    def has_rdma(self) -> bool:
        return bool(self.rdma_ports)


@dataclass(frozen=True, slots=True)
class Gpu:
    address: str  # on the PCI bus
    vendor: str  # PCI id, as in "0x10de"
    numa_node: int  # -1: unknown
    pci: tuple[str, ...]  # as in Nic


@dataclass(frozen=True, slots=True)
class Topology:
    numa_nodes: tuple[NumaNode, ...]
    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    problems: tuple[str, ...]  # entries of the tree that are missing or invalid

    def near_numa(self, number: int) -> tuple[str, ...]:
        """Names of the _best() cards on this NUMA node, or of all of them if none is there."""
        return _closest((nic, nic.numa_node != number) for nic in self._best())

    def near_gpu(self, gpu: Gpu) -> tuple[str, ...]:
        return _closest((nic, closeness(nic, gpu)) for nic in self._best())

    def _best(self) -> list[Nic]:
        """The cards that are up. If any has RDMA, only RDMA cards, because the others carry control
        traffic."""
        working = [nic for nic in self.nics if nic.is_up]
        return [nic for nic in working if nic.has_rdma] or working

    def ucx_net_devices(self, cpus: Iterable[int]) -> str:
        """UCX_NET_DEVICES for a process on these CPUs; "" if there is no RDMA. Lists the active
        RDMA ports on the NUMA nodes of these CPUs, or all active RDMA ports if there is none. Also
        lists interfaces for TCP, so that peers without RDMA can be reached."""
        nodes = {node.number for node in self.numa_nodes if set(node.cpus) & set(cpus)}
        working = [nic for nic in self.nics if nic.is_up]
        rdma = [nic for nic in working if nic.has_rdma]
        if not rdma:
            return ""
        close = [nic for nic in rdma if nic.numa_node in nodes] or rdma
        ports = [f"{nic.name}:{port}" for nic in close for port in nic.rdma_ports]
        plain = [nic.interface for nic in working if not nic.has_rdma]
        return ",".join([*ports, *(plain or [nic.interface for nic in close if nic.interface])])

    def as_dict(self) -> dict[str, object]:
        """The topology as JSON values, for NodeInfo.topology."""
        nodes = [
            {
                "node": node.number,
                "cpus": len(node.cpus),
                "memory_bytes": node.memory_bytes,
                "nics": self.near_numa(node.number),
            }
            for node in self.numa_nodes
        ]
        nics = [
            {
                "name": nic.name,
                "numa": nic.numa_node,
                "bits_per_s": nic.bits_per_s,
                "rdma": nic.has_rdma,
                "up": nic.is_up,
            }
            for nic in self.nics
        ]
        gpus = [
            {"pci": gpu.address, "numa": gpu.numa_node, "nics": self.near_gpu(gpu)}
            for gpu in self.gpus
        ]
        return {"numa": nodes, "nics": nics, "gpus": gpus}


def closeness(one: Nic | Gpu, other: Nic | Gpu) -> Closeness:
    shared = 0
    for this, that in zip(one.pci, other.pci, strict=False):
        if this != that:
            break
        shared += 1
    if shared >= 2:
        return Closeness.SWITCH
    if shared == 1:
        return Closeness.BRIDGE
    return Closeness.NUMA if one.numa_node == other.numa_node >= 0 else Closeness.NOTHING


def _closest(rated: Iterable[tuple[Nic, int]]) -> tuple[str, ...]:
    pairs = list(rated)
    least = min((rating for _, rating in pairs), default=0)
    return tuple(nic.name for nic, rating in pairs if rating == least)


def parse(tree: Mapping[str, str]) -> Topology:
    """The topology of a tree; entries that are missing or invalid are listed in `problems`."""
    reader = _Reader(tree)
    nodes = tuple(reader.numa_node(name) for name in reader.names(NODES) if _is_node(name))
    nodes = tuple(sorted(nodes, key=lambda node: node.number))
    reader.only_node = nodes[0].number if len(nodes) == 1 else -1
    rdmas = [reader.rdma(name) for name in reader.names(RDMAS)]
    taken = {nic.interface for nic in rdmas}
    nets = [reader.net(name) for name in reader.names(NETS) if name not in taken]
    nics = [*rdmas, *(nic for nic in nets if nic is not None)]
    gpus = [gpu for name in sorted(reader.names(PCIS)) if (gpu := reader.gpu(name)) is not None]
    if not nodes:
        reader.problems.append(f"{NODES}: no NUMA node is listed")
    return Topology(nodes, tuple(nics), tuple(gpus), tuple(reader.problems))


def _is_node(name: str) -> bool:
    return name.startswith("node") and name[4:].isdecimal()


class _Reader:
    """Reads fields of a tree; an unreadable field becomes a problem and a default value."""

    def __init__(self, tree: Mapping[str, str]) -> None:
        self._tree = tree
        self.only_node = -1  # NUMA node of every device; -1: the host does not have exactly one
        self.problems: list[str] = []

    def names(self, folder: str) -> list[str]:
        found = {
            path[len(folder) :].partition("/")[0] for path in self._tree if path.startswith(folder)
        }
        return sorted(found, key=_natural)

    def _text(self, path: str) -> str:
        return self._tree.get(path, "").strip()

    def _number(self, path: str, default: int) -> int:
        text = self._text(path)
        try:
            return int(text.split()[0])
        except (ValueError, IndexError):
            self.problems.append(f"{path}: {text!r} is no number" if text else f"{path}: missing")
            return default

    def _link(self, path: str) -> tuple[str, ...]:
        """The PCI devices on the way to the link's target, from the host bridge on."""
        text = self._text(path)
        parts = text.removeprefix(LINK).split("/") if text.startswith(LINK) else []
        found = tuple(part for part in parts if _PCI.match(part) or _BRIDGE.match(part))
        return found if found and _BRIDGE.match(found[0]) else ()

    def _numa_of(self, path: str) -> int:
        if self.only_node >= 0:
            return self.only_node
        number = self._number(path, -1)
        if number < 0:
            self.problems.append(f"{path}: the NUMA node of the device is unknown")
        return number

    def numa_node(self, name: str) -> NumaNode:
        folder = f"{NODES}{name}/"
        try:
            cpus = expand(self._text(folder + "cpulist"))
        except ValueError as error:
            self.problems.append(f"{folder}cpulist: {error}")
            cpus = ()
        total = re.search(r"MemTotal:\s+(\d+) kB", self._text(folder + "meminfo"))
        if total is None:
            self.problems.append(f"{folder}meminfo: no MemTotal")
        memory_bytes = int(total.group(1)) * 1024 if total else 0
        return NumaNode(int(name[4:]), cpus, memory_bytes)

    def net(self, name: str) -> Nic | None:
        """An interface with hardware; None for a virtual interface, such as the loopback."""
        folder = f"{NETS}{name}"
        pci = self._link(folder)
        if not pci:
            return None
        is_up = self._text(f"{folder}/operstate") == "up"
        megabits = 0
        if is_up and f"{folder}/speed" in self._tree:  # virtual cards have no speed or report -1
            megabits = max(0, self._number(f"{folder}/speed", 0))
        numa = self._numa_of(f"{folder}/device/numa_node")
        return Nic(name, name, (), megabits * 10**6, is_up, numa, pci)

    def rdma(self, name: str) -> Nic:
        folder = f"{RDMAS}{name}"
        active, bits_per_s = [], 0
        for port in self.names(f"{folder}/ports/"):
            state = self._text(f"{folder}/ports/{port}/state")
            if state.startswith("4"):  # "4: ACTIVE"
                active.append(int(port))
                gigabits = re.match(r"([\d.]+) Gb/sec", self._text(f"{folder}/ports/{port}/rate"))
                if gigabits is None:
                    self.problems.append(f"{folder}/ports/{port}/rate: no rate in Gb/sec")
                else:
                    bits_per_s = max(bits_per_s, int(float(gigabits.group(1)) * 1e9))
        interface = min(self.names(f"{folder}/device/net/"), default="")
        numa = self._numa_of(f"{folder}/device/numa_node")
        pci = self._link(folder)
        if not pci:
            self.problems.append(f"{folder}: its position on the PCI bus is unknown")
        return Nic(name, interface, tuple(active), bits_per_s, bool(active), numa, pci)

    def gpu(self, address: str) -> Gpu | None:
        folder = f"{PCIS}{address}"
        kind, vendor = self._text(f"{folder}/class"), self._text(f"{folder}/vendor")
        is_card = kind.startswith(_VGA) and vendor in _GPU_VENDORS
        if not is_card and not kind.startswith(_ACCELERATORS):
            return None
        numa = self._numa_of(f"{folder}/numa_node")
        return Gpu(address, vendor, numa, self._link(folder))


def expand(cpulist: str) -> tuple[int, ...]:
    """ "0-2,8" -> (0, 1, 2, 8), "" (a node without CPUs) -> (). Raises ValueError."""
    found: list[int] = []
    for part in cpulist.split(",") if cpulist else []:
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key with numbers in numeric order: mlx5_2 before mlx5_10."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    )
