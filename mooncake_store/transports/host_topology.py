"""Reads the files of /sys that topology.py parses; as a program, prints the topology as JSON.

With --record it prints the files themselves, in the format of tests/data. A file that cannot be
read counts as missing.

Network interfaces with their addresses are read here too, for nic_choice.py.

Not here: interpreting the files (topology.py, nic_choice.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mooncake_store.keys.folder import of_process
from mooncake_store.transports.paths.nic_choice import DataNetwork, Interface, data_network
from mooncake_store.transports.paths.topology import LINK, NETS, NODES, PCIS, RDMAS, Topology, parse

TRUSTED_NICS = "MOONCAKE_TRUSTED_NICS"
SYS = "/sys"
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_LOOPBACK_TYPE = "772"  # ARPHRD_LOOPBACK
WANTED = (  # (folder, files of each of its entries); if an entry is a link, its target is read too
    (NODES, ("cpulist", "meminfo", "distance")),
    (NETS, ("operstate", "speed", "device/numa_node")),
    (RDMAS, ("ports/*/state", "ports/*/rate", "device/net/*/operstate", "device/numa_node")),
    (PCIS, ("class", "vendor", "numa_node")),
)
_PCI_CLASSES = ("0x03", "0x12")  # displays and accelerators; a server has hundreds of other devices


def read_tree(root: str = SYS) -> dict[str, str]:
    """The tree below `root` (see topology.py); empty if there is none."""
    tree: dict[str, str] = {}
    for folder, files in WANTED:
        with contextlib.suppress(OSError):
            for entry in sorted(Path(root, folder).iterdir()):
                if folder == PCIS and not _text(entry / "class").startswith(_PCI_CLASSES):
                    continue
                if entry.is_symlink():
                    target = os.path.relpath(os.path.realpath(entry), os.path.realpath(root))
                    tree[folder + entry.name] = LINK + target
                for pattern in files:
                    for path in sorted(entry.glob(pattern)):
                        if text := _text(path):
                            tree[str(path.relative_to(root))] = text
    return tree


def _text(path: Path) -> str:
    """The first line; "" if it cannot be read, like the speed of a card that is down."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def host_topology() -> Topology:
    return parse(read_tree())


def preferred_ucx_devices() -> str:
    """UCX_NET_DEVICES for this process on this host; "" if no device is preferred."""
    return host_topology().ucx_net_devices(os.sched_getaffinity(0))


def host_interfaces(root: str = SYS) -> list[Interface]:
    """Interfaces of this host's current network namespace, without the loopback."""
    by_interface = {nic.interface: nic for nic in host_topology().nics if nic.has_rdma}
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted(Path(root, NETS).iterdir()):
            if not folder.is_dir() or _text(folder / "type") == _LOOPBACK_TYPE:
                continue
            name = folder.name
            here = [ip for ip in _addresses(name) if not ip.is_link_local and not ip.is_loopback]
            rdma = by_interface.get(name)
            found.append(
                Interface(
                    name=name,
                    addresses=tuple(str(ip.ip) for ip in here),
                    networks=tuple(str(ip.network) for ip in here),
                    is_up=_text(folder / "operstate") in ("up", "unknown"),
                    is_physical=(folder / "device").exists(),
                    is_part=(folder / "master").exists(),
                    is_bridge=(folder / "bridge").exists(),
                    rdma_devices=tuple(f"{rdma.name}:{port}" for port in rdma.rdma_ports)
                    if rdma
                    else (),
                )
            )
    return found


def _addresses(name: str) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """The interface's first IPv4 address and all its IPv6 addresses."""
    found: list[ipaddress.IPv4Interface | ipaddress.IPv6Interface] = []
    request = struct.pack("256s", name.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        address, mask = (
            socket.inet_ntoa(fcntl.ioctl(asked, question, request)[20:24])
            for question in (_SIOCGIFADDR, _SIOCGIFNETMASK)
        )
        found.append(ipaddress.IPv4Interface(f"{address}/{mask}"))
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            raw, _, prefix, _, _, owner = line.split()
            if owner == name:
                address6 = ipaddress.IPv6Address(bytes.fromhex(raw))
                found.append(ipaddress.IPv6Interface((address6, int(prefix, 16))))
    return found


def host_data_network() -> DataNetwork:
    """The cards of this host that move KV to other hosts by NIXL, from the current environment."""
    # UCX's ports accept any client. So a process with keys uses only cards that TRUSTED_NICS names.
    unless_named = None if of_process() is None else ""
    trusted = os.environ.get(TRUSTED_NICS, unless_named)
    return data_network(host_interfaces(), trusted, os.environ.get("UCX_NET_DEVICES", ""))


def has_carrier(interface: str) -> bool:
    """False: the kernel reports the card as down, so nothing arrives through it."""
    return _text(Path(SYS, NETS, interface, "operstate")) in ("up", "unknown")


def topology_json() -> str:
    """The topology of this host, for NodeInfo.topology."""
    return json.dumps(host_topology().as_dict(), separators=(",", ":"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mooncake_store.transports.host_topology",
        description="NUMA nodes, network cards and GPUs of a host, and how close they are.",
    )
    parser.add_argument("--sys", default=SYS, help="read this tree instead of /sys")
    parser.add_argument("--record", action="store_true", help="print the tree instead")
    options = parser.parse_args(argv)
    tree = read_tree(options.sys)
    found = parse(tree)
    print(json.dumps(tree if options.record else found.as_dict(), indent=1))
    for problem in found.problems:
        print(problem, file=sys.stderr)


if __name__ == "__main__":
    main()
