"""A whole deployment on this machine: three hosts by one cluster file, each in its namespace.

    with ServedFleet(folder) as fleet:           # started, ready
        fleet.hosts["b"].kill("decode")
        fleet.why_not_whole("b")                 # "" again, seconds later

Two of three hosts have each part that requests need (a frontend, a directory, a prefill worker, a
decode worker). All three have a member of etcd and a storage node, so any host may be lost. Hosts
authenticate by keys; while the fleet runs this process has those of a fourth host, `outside`.

Not here: one host (host.py), the network (namespaces.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.harness.fleet.host import READY_S_MAX, FleetHost
from bench.harness.fleet.namespaces import Namespaces
from loadtest.client.server import Addresses
from loadtest.harness.server import ServerFailed, model_states
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import VARIABLE
from mooncake_store.records.membership import WorkerInfo

NAME, OUTSIDE = "fleet", "outside"
DRAM = "128M"  # bytes of each storage node
GRPC_PORT, METRICS_PORT = 8001, 8002
LOOK_S_MAX = 2.0
CLUSTER_FILE = """\
name: {name}
hosts:
{hosts}
etcd: {{hosts: [{all}]}}
directories: {{hosts: [a, b]}}
storage_nodes:
{nodes}
frontends: {{hosts: [a, b], address: 0.0.0.0, metrics_address: 0.0.0.0}}
pools:
  prefill: {{role: prefill, threads: 1, workers: {{a: 1, b: 1}}}}
  decode: {{role: decode, threads: 1, workers: {{b: 1, c: 1}}}}
conductor: {{ttft_slo_s: 60, tbt_slo_s: 10}}
keys: {{folder: keys}}
trusted_data_network: [e0]
"""


def cluster_file(hosts: Namespaces, text: str = CLUSTER_FILE) -> str:
    """The file for the hosts of these namespaces. They share a kernel, so each has its own
    identity, and UCX is limited to TCP on their link; otherwise it would use shared memory."""
    environment = "{UCX_TLS: tcp, UCX_NET_DEVICES: e0}"
    return text.format(
        name=NAME,
        all=", ".join(hosts.hosts),
        hosts="\n".join(
            f"  {host}: {{address: {hosts.address(host)}, identity: {host}, "
            f"environment: {environment}}}"
            for host in hosts.hosts
        ),
        nodes="\n".join(f"  {host}0: {{host: {host}, dram: {DRAM}}}" for host in hosts.hosts),
    )


class ServedFleet:
    """Started at the begin of the block, stopped and removed at its end."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("a", "b", "c"),
        text: str = CLUSTER_FILE,
        options: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.namespaces = Namespaces(names)
        self.path = folder / "cluster.yaml"
        self.path.write_text(cluster_file(self.namespaces, text))
        authority = Authority.begun(folder / "keys")
        for name in names:
            authority.add_host(name, address=self.namespaces.address(name))
        authority.add_host(OUTSIDE, may_direct=False)
        self._closing = contextlib.ExitStack()
        self.hosts = {
            name: FleetHost(self.namespaces, name, self.path, folder / f"{name}.log", options)
            for name in names
        }
        self._whole: Mapping[str, frozenset[str]] = {}  # processes of each host when all was ready
        self._workers: frozenset[str] = frozenset()
        self._nodes: frozenset[str] = frozenset()
        self.directory: DirectoryClient | None = None

    def __enter__(self) -> ServedFleet:
        self._closing.enter_context(keys_of_process(self.folder / "keys" / OUTSIDE))
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def frontends(self) -> dict[str, str]:
        """Host -> gRPC address for clients."""
        return {
            name: f"{host.address}:{GRPC_PORT}"
            for name, host in self.hosts.items()
            if "conductor" in self._whole.get(name, ())
        }

    @property
    def launcher_pids(self) -> set[int]:
        """Process ids of all launchers of all hosts."""
        return {pid for host in self.hosts.values() for pid in host.launcher_pids}

    def start(self) -> None:
        """Start all hosts at once; returns when every host is ready and in the directory."""
        for host in self.hosts.values():
            host.start()
        for host in self.hosts.values():
            host.wait_ready()
        self._whole = {name: self._running(host) for name, host in self.hosts.items()}
        named = frozenset[str]().union(*self._whole.values())
        self._workers = frozenset(
            each for each in named if each.startswith(("prefill_", "decode_"))
        )
        self._nodes = frozenset(
            each.removeprefix("node ") for each in named if each.startswith("node ")
        )
        endpoints = ",".join(f"{host.address}:2379" for host in self.hosts.values())
        address = f"etcd://{endpoints}/mooncake/{NAME}/directory"
        self.directory = DirectoryClient(address, timeout_s=LOOK_S_MAX)
        give_up_s = time.monotonic() + READY_S_MAX
        while problems := list(filter(None, map(self.why_not_whole, self.hosts))):
            if time.monotonic() > give_up_s:
                raise ServerFailed(f"the fleet is not ready: {'; '.join(problems)}")
            time.sleep(0.2)

    def whole(self, name: str) -> frozenset[str]:
        """The processes of the host when the fleet was ready, by their names in
        bench.harness.processes."""
        return self._whole[name]

    def why_not_whole(self, name: str) -> str:
        """The missing part of a host; "" when all that served at the start serves."""
        host = self.hosts[name]
        if not host.is_running:
            return f"{name}: `mooncake serve` has ended"
        if missing := self._whole[name] - self._running(host):
            return f"{name}: no {', '.join(sorted(missing))}"
        if waiting := not_ready(f"{host.address}:{METRICS_PORT}"):
            return f"{name}: {waiting}"
        try:
            return self._missed(name)
        except StoreError as error:
            return f"no directory answers: {error}"

    def workers(self) -> list[WorkerInfo]:
        assert self.directory is not None
        return self.directory.workers()

    def _missed(self, name: str) -> str:
        """The host's workers and nodes that the directory lacks."""
        assert self.directory is not None
        nodes = {node.node_id for node in self.directory.stats().nodes if node.is_open}
        known = nodes | {worker.worker_id for worker in self.workers()}
        here = {each.removeprefix("node ") for each in self._whole[name]}
        missed = here & (self._nodes | self._workers) - known
        return f"{name}: the directory lacks {', '.join(sorted(missed))}" if missed else ""

    def _running(self, host: FleetHost) -> frozenset[str]:
        return frozenset(name for name, _ in host.named() if name)

    def stop(self) -> dict[str, int]:
        """Stop all hosts at once, in order; the exit status of each."""
        for host in self.hosts.values():
            host.interrupt()
        return {name: host.stop() for name, host in self.hosts.items()}

    def close(self) -> None:
        """Kill and remove everything, after any error."""
        if self.directory is not None:
            self.directory.close()
            self.directory = None
        try:
            if any(host.is_running for host in self.hosts.values()):
                self.stop()
        finally:
            self._closing.close()
            self.namespaces.close()


@contextlib.contextmanager
def keys_of_process(folder: Path) -> Iterator[None]:
    """Set these keys until the block ends, then restore the earlier ones."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def not_ready(metrics: str) -> str:
    """Why a host is not ready, from its metrics port; "" when all models are."""
    states = model_states(Addresses("", "", metrics), LOOK_S_MAX)
    if isinstance(states, str):
        return states
    return ", ".join(f"{name} loads" for name, is_ready in states.items() if not is_ready)
