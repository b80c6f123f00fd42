"""The processes that the benchmark measures: a directory and two storage nodes, one with an SSD.

Not here: what is measured (ways.py, __main__.py).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.ready_process import ready_process

MB = 2**20
UNIT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Site:
    """Addresses of a running store. `near` is the clients' own node, `far` another one."""

    address: str
    near: str = "near"
    far: str = "far"
    ssd: str = "ssd"


@contextlib.contextmanager
def site(dram_mib: int, ssd_folder: Path | None, ssd_mib: int) -> Iterator[Site]:
    """Until the block ends. The node `ssd` has little DRAM, so what is put there spills."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-"))
        found = Site(f"ipc://{folder}/directory")

        def start(module: str, *arguments: str) -> None:
            ready_process(stack, module, *arguments, log=Path(folder) / "log")

        def node(node_id: str, mib: int, *more: str) -> None:
            path = f"/dev/shm/mooncake-bench-{os.getpid()}-{node_id}"
            start(
                "node", "--node-id", node_id, "--directory", found.address, "--die-with-parent",
                "--segment-bytes", str(mib * MB), "--segment-path", path,
                "--unit-bytes", str(UNIT_BYTES),
                "--control", f"ipc://{folder}/{node_id}", *more,
            )  # fmt: skip

        start("directory", "--address", found.address, "--events", f"ipc://{folder}/events")
        node(found.near, dram_mib)
        node(found.far, dram_mib)
        if ssd_folder is not None:
            node(found.ssd, 128, "--ssd-path", str(ssd_folder), "--ssd-bytes", str(ssd_mib * MB))
        yield found
