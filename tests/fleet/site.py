"""Three hosts of one deployment as network namespaces, and a client for their tests.

    a   etcd, directory, node a0, frontend, prefill_a_0
    b   etcd,            node b0, frontend,              decode_b_0
    c   etcd, directory, node c0,           prefill_c_0, decode_c_0

So a request may be prefilled on one host and decoded on another, and any one host may be lost: etcd
keeps its quorum, a directory its chance, and both roles a worker. A directory leads on a or on c,
so b may be cut from either of them.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from bench.harness.fleet import FleetHost, Namespaces
from mooncake_store.block_keys import block_keys, chain_seed
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.election import Leader, leader_at
from mooncake_store.errors import StoreError
from mooncake_store.keys.authority import Authority
from tests.e2e.server import Answer, Stream, tensor, wait_until

NAMES = ("a", "b", "c")
B = 64
READY_S_MAX = 120.0
BACK_S_MAX = 60.0
ETCD_PORT = 2379
FILE = """
name: three
hosts:
{hosts}
etcd: {{hosts: [a, b, c]}}
directories: {{hosts: [a, c]}}
storage_nodes:
  a0: {{host: a, dram: 128M}}
  b0: {{host: b, dram: 128M}}
  c0: {{host: c, dram: 128M}}
frontends: {{hosts: [a, b], address: 0.0.0.0, metrics_address: 0.0.0.0}}
pools:
  prefill: {{role: prefill, workers: {{a: 1, c: 1}}}}
  decode: {{role: decode, workers: {{b: 1, c: 1}}}}
conductor: {{hot_hits_per_s: 0.3}}
{keys}
"""
# One kernel is under all three: what would find that out is told otherwise.
HOST = (
    "  {name}: {{address: {address}, identity: {name}, state_dir: {state}, "
    "environment: {{UCX_TLS: tcp, UCX_NET_DEVICES: e0}}}}"
)


class Fleet:
    """See the module docstring."""

    def __init__(self, namespaces: Namespaces, folder: Path, is_secured: bool) -> None:
        self.namespaces, self.folder = namespaces, folder
        self.keys = folder / "keys"  # of this process: those of host a
        keys = "keys: {insecure: true}"
        if is_secured:
            keys = "keys: {folder: keys}\ntrusted_data_network: [e0]"
            authority = Authority.begun(self.keys)
            for name in NAMES:
                authority.add_host(name, address=namespaces.address(name))
        state = folder / "state"  # one of all hosts: the first to start measures this machine
        self.file = folder / "cluster.yaml"
        lines = [
            HOST.format(name=name, address=namespaces.address(name), state=state) for name in NAMES
        ]
        self.file.write_text(FILE.format(hosts="\n".join(lines), keys=keys))
        self.hosts = {
            name: FleetHost(namespaces, name, self.file, folder / f"{name}.log") for name in NAMES
        }
        endpoints = ",".join(f"{namespaces.address(name)}:{ETCD_PORT}" for name in NAMES)
        self.launcher_pids: set[int] = set()
        self.directory = f"etcd://{endpoints}/mooncake/three/directory"

    def start(self, *names: str) -> None:
        """All of them, or some."""
        chosen = [self.hosts[name] for name in names or NAMES]
        for host in chosen:
            host.start()
        for host in chosen:
            host.wait_ready(READY_S_MAX)
            self.launcher_pids |= {process.pid for process in host.processes("launcher")}

    def stop(self) -> dict[str, int]:
        """All at once, as an operator does who leaves; the exit status of each."""
        with ThreadPoolExecutor(len(NAMES)) as pool:
            return dict(zip(NAMES, pool.map(FleetHost.stop, self.hosts.values()), strict=True))

    def said(self, host: str) -> str:
        """By its launcher, since it was started first."""
        return self.hosts[host].log_path.read_text(errors="replace")

    # ---- requests

    def stream(
        self,
        frontend: str,
        prompt: list[int],
        max_tokens: int,
        prefill: str = "",
        decode: str = "",
        tenant: str = "",
    ) -> Stream:
        pins = {"prefill_worker": prefill, "decode_worker": decode, "tenant": tenant}
        inputs = {
            "input_ids": prompt,
            "max_tokens": max_tokens,
            "end_id": -1,
            "stream": True,
            "temperature": 0.0,
            "return_decision": True,
        }
        return Stream(
            f"{self.namespaces.address(frontend)}:8001",
            "conductor",
            [tensor(name, value) for name, value in inputs.items()],
            {name: worker for name, worker in pins.items() if worker},
        )

    def ask(self, frontend: str, prompt: list[int], max_tokens: int, **pins: str) -> Answer:
        return self.stream(frontend, prompt, max_tokens, **pins).all()

    def begun(self, stream: Stream, tokens: int) -> Answer:
        """What came until so many tokens were there."""
        return stream.begun(tokens)

    def serves(self, frontend: str, **pins: str) -> bool:
        """Does a small request come through this frontend, with these workers?"""
        try:
            answer = self.ask(frontend, [40, 41, 42], 2, **pins)
        except InferenceServerException:  # the connection was refused before the request was sent
            return False
        return not answer.error and all(
            answer.decision[role] == name for role, name in pins.items()
        )

    def wait_serves(self, frontend: str, **pins: str) -> float:
        """Seconds until it did."""
        began_s = time.monotonic()
        wait_until(lambda: self.serves(frontend, **pins), f"{frontend} {pins} to serve", BACK_S_MAX)
        return time.monotonic() - began_s

    # ---- looking in from outside

    def leader(self) -> Leader | None:
        try:
            return leader_at(self.directory)
        except StoreError:
            return None

    def leading_host(self) -> str:
        leader = wait_until(self.leader, "a directory to lead")
        return next(name for name in NAMES if self.namespaces.address(name) in leader.address)

    @contextmanager
    def client(self) -> Iterator[DirectoryClient]:
        with DirectoryClient(self.directory) as client:
            yield client

    def asked(self, question: Callable[[DirectoryClient], Any]) -> Any:
        """None while no directory answers."""
        try:
            with self.client() as client:
                return question(client)
        except StoreError:
            return None

    def nodes(self) -> set[str]:
        return {info.node_id for info in self.asked(DirectoryClient.nodes) or ()}

    def workers(self) -> dict[str, str]:
        """Name -> incarnation, as the directory that leads says."""
        return {
            info.worker_id: info.incarnation for info in self.asked(DirectoryClient.workers) or ()
        }

    def holders(self, prompt: list[int]) -> list[set[str]]:
        """Which nodes hold each full block of the prompt."""

        def look(client: DirectoryClient) -> list[set[str]]:
            [fingerprint] = {worker.fingerprint for worker in client.workers()}
            keys = block_keys(np.array(prompt), B, chain_seed(fingerprint))
            found = client.lookup(keys, "test", 0.0)
            return [{copy.node_id for copy in copies} for copies in found]

        return self.asked(look) or []

    def metric(self, host: str, name: str, **labels: str) -> float:
        """The sum of the samples of this host with this name and these labels."""
        url = f"http://{self.namespaces.address(host)}:8002/metrics"
        with urllib.request.urlopen(url, timeout=10.0) as page:
            lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition("{")[0] == name and all(each in line for each in wanted)
        )

    def nixl_read_bytes(self, host: str, worker: str) -> float:
        return self.metric(
            host, "mooncake_transfer_bytes_total", transport="nixl", direction="read", model=worker
        )


def leftovers(fleet: Fleet) -> list[str]:
    """Processes in the namespaces, and shared memory of this fleet's launchers."""
    pids = [pid for name in NAMES for pid in fleet.namespaces.pids(name)]
    names = tuple(f"mooncake-{pid}-" for pid in fleet.launcher_pids)
    files = [
        path.name
        for folder in (Path("/dev/shm"), Path("/tmp"))
        for path in folder.iterdir()
        if path.name.startswith(names)
    ]
    return [*map(str, pids), *files]
