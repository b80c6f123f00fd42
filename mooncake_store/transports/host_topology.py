"""What topology.py understands, read from /sys: `python -m` this module prints it.

Prints the topology as JSON; with --record the tree itself, as the recorded ones in tests/data are.
Only a few hundred small files are read, and one that cannot be read counts as missing.

Not here: what they mean (topology.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mooncake_store.transports.paths.topology import LINK, NETS, NODES, PCIS, RDMAS, Topology, parse

SYS = "/sys"
WANTED = (  # (folder, files of each entry; its own link is read too)
    (NODES, ("cpulist", "meminfo", "distance")),
    (NETS, ("operstate", "speed", "device/numa_node")),
    (RDMAS, ("ports/*/state", "ports/*/rate", "device/net/*/operstate", "device/numa_node")),
    (PCIS, ("class", "vendor", "numa_node")),
)
_PCI_CLASSES = ("0x03", "0x12")  # displays and accelerators; a server has hundreds of others


def read_tree(root: str = SYS) -> dict[str, str]:
    """The tree below `root` (see topology.py); empty where there is none."""
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
    """The first line; "" when it cannot be read, as the speed of a card that is down."""
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def host_topology() -> Topology:
    """This host's, read once."""
    return parse(read_tree())


def preferred_ucx_devices() -> str:
    """UCX_NET_DEVICES for this process on this host; "" when there is nothing to prefer."""
    return host_topology().ucx_net_devices(os.sched_getaffinity(0))


def topology_json() -> str:
    """For NodeInfo.topology."""
    return json.dumps(host_topology().as_dict(), separators=(",", ":"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mooncake_store.transports.host_topology",
        description="NUMA nodes, network cards and GPUs of a host, and which is near which.",
    )
    parser.add_argument("--sys", default=SYS, help="another tree than /sys")
    parser.add_argument("--record", action="store_true", help="print the tree instead")
    options = parser.parse_args(argv)
    tree = read_tree(options.sys)
    found = parse(tree)
    print(json.dumps(tree if options.record else found.as_dict(), indent=1))
    for problem in found.problems:
        print(problem, file=sys.stderr)


if __name__ == "__main__":
    main()
