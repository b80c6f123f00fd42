"""Measures transfers between two storage nodes of this host, by each transport.

The probe starts a directory and two small storage nodes, reads from one node to the other by each
transport, and stops these processes. The probe runs as a process of its own, which prints one line
of JSON, because NIXL and UCX may crash their process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from mooncake_store.cli.serving import StoreProcesses
from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.layout import KvLayout
from mooncake_store.transports.rates import PathReport

WAYS = ("mapped", "nixl", "tcp")  # transports
SEGMENT_BYTES = 32 * 2**20  # memory of each storage node
ANSWER_S_MAX = 3.0  # longest wait for the other node's answer in one round
ROUNDS = 3  # number of measurements of each transport
PROBE_S_MAX = 120.0  # timeout of the whole probe, which takes a few seconds on a quiet machine
LAYOUT = KvLayout(layers=4, kv_heads=1, head_dim=1024, dtype="float32", block_tokens=4)


@dataclass(frozen=True, slots=True)
class ProbedWay:
    """Measured reads by one transport from another storage node of this host."""

    transport: str
    bytes_per_s: float = 0.0  # 0: the transport does not work
    latency_s: float = 0.0  # duration of a small read; 0: the transport does not work
    problem: str = ""  # why the transport does not work; "" if it works


def probe() -> list[ProbedWay]:
    """Measure in a child process. If the child crashes, or has no result within PROBE_S_MAX, the
    only entry of the list has the transport `any` and the problem."""
    with tempfile.TemporaryDirectory(prefix="mooncake-doctor-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-m", "backends.doctor.transfer_probe", folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = child.communicate(timeout=PROBE_S_MAX)
        except subprocess.TimeoutExpired:
            what = f"the probe of transfers did not end within {PROBE_S_MAX:.0f} s"
            return [ProbedWay("any", problem=what)]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # the child, its directory and its nodes
            child.communicate()
            for segment in Path("/dev/shm").glob(f"*-{_node_name(child.pid, '*')}"):
                segment.unlink(missing_ok=True)
    try:
        return [ProbedWay(**each) for each in json.loads(output.splitlines()[-1])]
    except (IndexError, ValueError, TypeError):
        words = errors.strip()[-500:] or "it printed nothing"
        what = f"the probe of transfers ended with status {child.returncode}: {words}"
        return [ProbedWay("any", problem=what)]


def measure(folder: Path) -> list[ProbedWay]:
    """Measure in this process. `folder`: for sockets and logs. ChildDied: a node did not start."""
    options = ["--data", "127.0.0.1:0"]
    nodes = [_node_name(os.getpid(), which) for which in ("own", "other")]
    store = StoreProcesses(folder, nodes, SEGMENT_BYTES, None, 0, [], options)
    try:
        store.start()
        return [_measured(store.address, way, *nodes) for way in WAYS]
    finally:
        store.stop()


def _node_name(pid: int, which: str) -> str:
    """A node name that no other probe and no other store on this host has."""
    return f"doctor-{pid}-{which}"


def _measured(address: str, way: str, own: str, other: str) -> ProbedWay:
    """The best of ROUNDS measurements, because other load only makes a measurement slower."""
    try:
        with DirectoryClient(address) as directory:
            store = Store(directory, own, "doctor", LAYOUT, way)
            try:
                found = [_read(store, other) for _ in range(ROUNDS)]
            finally:
                store.close()
    except StoreError as error:
        return ProbedWay(way, problem=str(error))
    read = [path for path in found if path is not None]
    if not read:
        return ProbedWay(way, problem=f"no read ended within {ANSWER_S_MAX:.0f} s")
    rate, latency_s = max(path.bytes_per_s for path in read), min(path.latency_s for path in read)
    return ProbedWay(read[0].transport, rate, latency_s)


def _read(store: Store, node: str) -> PathReport | None:
    store.measure_rates(ANSWER_S_MAX)
    return next((path for path in store.paths() if path.node_id == node), None)


if __name__ == "__main__":
    print(json.dumps([asdict(each) for each in measure(Path(sys.argv[1]))]), flush=True)
    os._exit(0)  # UCX may crash in a normal exit
