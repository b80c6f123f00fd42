"""A process of its own, in a /dev/shm in which a node's next life has no room beside the dead one.

    python -m tests.mooncake_store.small_memory FOLDER MIB

Two nodes of MIB each, a worker at each of them and a client, all idle; one node after the other is
killed and started again. Ends with status 0 when each came back and takes blocks, and a third one
has waited for room that somebody else had.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mooncake_store.client.client import StoreClient
from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient
from tests.mooncake_store.memory.test_dead_memory import LAYOUT, PATIENCE_S, stored, until
from tests.mooncake_store.processes import MIB, SiteProcesses


def free_mib() -> int:
    room = os.statvfs("/dev/shm")
    return room.f_bavail * room.f_frsize // MIB


def main(site: SiteProcesses, mib: int) -> None:
    nodes = [site.node(node_id, mib) for node_id in ("s0", "s1")]
    assert free_mib() < mib, f"{free_mib()} MiB are free: room enough for a third segment"
    directory = DirectoryClient(site.address)
    workers = [Store(directory, node.node_id, "f" * 32, LAYOUT) for node in nodes]
    client = StoreClient(site.address, node_id="s0", transports="mapped")
    client.put([b"c" * 16], [np.ones(1000, np.uint8)])
    for node, worker in zip(nodes, workers, strict=True):
        page = np.zeros(LAYOUT.block_bytes, np.uint8)
        worker.register_buffer(page)
        stored(worker, f"before {node.node_id}".encode().ljust(16), 1)
        node.end(signal.SIGKILL)
        node.start()
        key = f"after {node.node_id}".encode().ljust(16)
        stored(worker, key, 2)
        [copies] = worker.lookup([key], "reader", 60.0)
        assert worker.read(copies, page, [0], PATIENCE_S) == [True] and (page == 2).all()
        print(node.node_id, "came back", flush=True)
    waits_for_room(site)


def waits_for_room(site: SiteProcesses) -> None:
    """A node that finds no room says so, and starts when there is some."""
    small_mib = free_mib() * 3 // 4
    others = Path("/dev/shm/others")
    with others.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, small_mib * MIB)
    log = site.folder / "s2.log"
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(site.node, "s2", small_mib)
        until(lambda: log.exists() and "waits up to 30 s" in log.read_text(), "it to say so")
        assert not starting.done()
        others.unlink()
        starting.result(PATIENCE_S)
    assert "had room after" in log.read_text()


if __name__ == "__main__":
    made = SiteProcesses(Path(sys.argv[1]))
    status = 1
    try:
        main(made, int(sys.argv[2]))
        status = 0
    except Exception:  # process edge: say why, and leave nothing running
        traceback.print_exc()
    finally:
        made.close()
    sys.stdout.flush()
    os._exit(status)  # UCX's own exit handlers may crash, see nixl_agent
