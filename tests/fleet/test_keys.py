"""Three hosts with keys: which clients each port accepts, and keys renewed while they serve."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends import worker_tls
from bench.harness.fleet import Namespaces, why_no_namespaces
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.etcd import EtcdAccessRefused, EtcdClient, etcd_url
from mooncake_store.errors import AccessRefused, StoreError
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import VARIABLE
from mooncake_store.transports.tcp_transport import TcpTransport
from mooncake_store.wire.mailbox import Outbox
from mooncake_store.wire.node_protocol import NodeClient
from tests.e2e.server import wait_until
from tests.fleet.site import ETCD_PORT, NAMES, Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

RENEWED_S_MAX = 120.0
PROMPT = [40 + n for n in range(2 * 64 + 3)]
OPEN_PORTS = {8000, 8001, 8002}  # who asks for no key: clients' ports, metrics
ETCD_PORTS = {2379, 2380}


class KeyedFleet(Fleet):
    """This process is a host of the cluster, `outside`, on which nothing runs."""

    def __init__(self, namespaces: Namespaces, folder: Path) -> None:
        super().__init__(namespaces, folder, is_secured=True)
        self.authority = Authority.read(self.keys)
        self.authority.add_host("outside", may_direct=False)
        Authority.begun(folder / "other").add_host("stranger")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedFleet]:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with Namespaces(NAMES) as namespaces, pytest.MonkeyPatch.context() as patch:
        made = KeyedFleet(namespaces, tmp_path_factory.mktemp("keyed"))
        patch.setenv(VARIABLE, str(made.keys / "outside"))
        patch.delenv("MOONCAKE_INSECURE", raising=False)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture(params=["stranger", ""])
def stranger(
    request: pytest.FixtureRequest, fleet: KeyedFleet, monkeypatch: pytest.MonkeyPatch
) -> str:
    """From here on this process has keys of another cluster, or none."""
    if request.param:
        monkeypatch.setenv(VARIABLE, str(fleet.folder / "other" / "stranger"))
    else:
        monkeypatch.delenv(VARIABLE)
    return str(request.param)


def test_a_request_crosses_hosts_with_kv_over_nixl(fleet: KeyedFleet) -> None:
    fleet.wait_serves("a")
    before = fleet.nixl_read_bytes("c", "decode_c_0")
    pins = {"prefill": "prefill_a_0", "decode": "decode_c_0"}
    answer = fleet.ask("a", PROMPT, 8, **pins)
    assert not answer.error and len(answer.output_ids) == 8
    wait_until(
        lambda: fleet.nixl_read_bytes("c", "decode_c_0") > before, "KV to have come over NIXL"
    )


def test_a_stranger_is_refused_at_every_kind_of_port(
    fleet: KeyedFleet, stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(fleet.keys / "outside"))
    with fleet.client() as client:
        nodes, workers, leader = client.nodes(), client.workers(), client.leader()
    if stranger:
        monkeypatch.setenv(VARIABLE, str(fleet.folder / "other" / stranger))
    else:
        monkeypatch.delenv(VARIABLE)
    for address in (fleet.directory, leader.address):  # etcd refuses it, and the directory
        with DirectoryClient(address, 30.0) as client, pytest.raises(AccessRefused):
            client.nodes()
    for host in NAMES:
        with pytest.raises(EtcdAccessRefused, match=fleet.namespaces.address(host)):
            EtcdClient([etcd_url(f"{fleet.namespaces.address(host)}:{ETCD_PORT}")]).get("any")
    for node in nodes:
        with NodeClient(node.control) as asked, pytest.raises(AccessRefused):
            asked.ping(30.0)
        transport = TcpTransport()
        with pytest.raises(AccessRefused):
            transport.connect(node)
        transport.close()
    for worker in workers:
        outbox: Outbox[bytes] = Outbox(bytes)
        until_s = time.monotonic() + 30.0
        while outbox.send(worker.inbox, b"stop"):
            assert time.monotonic() < until_s, "its inbox has never refused"
            time.sleep(0.02)  # poll
        outbox.close()
        with worker_tls.worker_channel(worker.grpc_address, []) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as failed:
                stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=30.0)
        refused = worker_tls.refusal(worker.grpc_address, failed.value.details())
        assert refused is not None and worker.grpc_address in str(refused)
    monkeypatch.setenv(VARIABLE, str(fleet.keys / "outside"))
    assert fleet.serves("a") and fleet.serves("b")


def test_every_port_of_a_host_is_one_of_the_threat_model_s(fleet: KeyedFleet) -> None:
    """Others than those that ask for keys are known by number, UCX's by its trusted address."""
    with fleet.client() as client:
        known = {int(re.split(r"[:#]", info.control)[2]) for info in client.nodes()}
        known |= {int(info.data_address.rpartition(":")[2]) for info in client.nodes()}
        known |= {int(re.split(r"[:#]", each.inbox)[2]) for each in client.workers()}
        known |= {int(each.grpc_address.rpartition(":")[2]) for each in client.workers()}
    known |= {7001, 7002} | OPEN_PORTS | ETCD_PORTS
    for name in NAMES:
        found = set()
        for pid in fleet.namespaces.pids(name):
            with contextlib.suppress(psutil.Error):
                found |= {
                    (each.laddr.ip, each.laddr.port)
                    for each in psutil.Process(pid).net_connections("tcp")
                    if each.status == psutil.CONN_LISTEN and not each.laddr.ip.startswith("127.")
                }
        others = {(ip, port) for ip, port in found if port not in known}
        for ip, port in others:  # a frontend's inbox asks for keys, UCX speaks no ZeroMQ
            assert ip == fleet.namespaces.address(name), f"{name} listens at {ip}:{port}"
            with socket.create_connection((ip, port), timeout=5.0) as peer:
                peer.settimeout(2.0)
                greeting = b""
                with contextlib.suppress(OSError):
                    greeting = peer.recv(64)
                # ZeroMQ greets with its signature; UCX waits for its peer.
                assert greeting[:1] in (b"", b"\xff"), f"{name}: {ip}:{port} says {greeting!r}"


def test_no_secret_is_in_an_argument_or_a_log(fleet: KeyedFleet) -> None:
    secrets = []
    for host in NAMES:
        place = fleet.keys / host
        found = json.loads((place / "zeromq.json").read_text())["generations"]
        secrets += [(place / "secret").read_text(), (place / "host.key").read_text().split("\n")[1]]
        secrets += [each["own_secret"] for each in found]
        secrets += [each["directory_secret"] for each in found]
        for pid in fleet.namespaces.pids(host):
            with contextlib.suppress(OSError):
                shown = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
                assert not [each for each in secrets if each in shown], f"process {pid}"
    logs = [path.read_text(errors="replace") for path in fleet.folder.rglob("*.log")]
    assert logs and not [each for each in secrets for log in logs if each in log]


def test_keys_are_renewed_while_requests_run_and_none_fails(fleet: KeyedFleet) -> None:
    wanted = fleet.ask("a", PROMPT, 60).output_ids
    assert len(wanted) == 60
    outcomes: Counter[str] = Counter()
    is_over = threading.Event()

    def ask(frontend: str) -> None:
        while not is_over.is_set():
            answer = fleet.ask(frontend, PROMPT, 60)
            is_right = not answer.error and answer.output_ids == wanted
            outcomes["right" if is_right else f"wrong: {answer.error}"] += 1

    threads = [threading.Thread(target=ask, args=(frontend,)) for frontend in "ab"]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            before, members = fleet.workers(), etcd_members(fleet)
            assert before
            step = fleet.authority.rotate()
            until_s = time.monotonic() + RENEWED_S_MAX
            while not is_renewed(fleet, before):
                assert time.monotonic() < until_s, f"{before} -> {fleet.workers()}"
                time.sleep(0.3)  # poll
            kept = members & etcd_members(fleet)
            assert kept == (members if step == "switch" else set()), "whom etcd believes, it reads"
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert outcomes.keys() == {"right"}, outcomes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(fleet.folder / "other" / "stranger"))
        with pytest.raises(StoreError), DirectoryClient(fleet.directory, 10.0) as client:
            client.nodes()


def test_steps_of_a_renewal_that_come_too_fast_lock_no_worker_out(fleet: KeyedFleet) -> None:
    """Nobody believes workers that were started two steps ago: they are started again all the
    same, and the fleet serves."""
    before = fleet.workers()
    for _ in range(3):
        fleet.authority.rotate()
    wait_until(lambda: is_renewed(fleet, before), "all workers to be new", 3 * RENEWED_S_MAX)
    for frontend in "ab":
        fleet.wait_serves(frontend)
        answer = fleet.ask(frontend, PROMPT, 8)
        assert not answer.error and len(answer.output_ids) == 8


def is_renewed(fleet: KeyedFleet, before: dict[str, str]) -> bool:
    """Is every worker there in another incarnation?"""
    now = fleet.workers()
    return now.keys() == before.keys() and all(now[name] != before[name] for name in before)


def etcd_members(fleet: KeyedFleet) -> set[int]:
    """Their processes, one of each host."""
    return {each.pid for host in fleet.hosts.values() for each in host.processes("etcd")}
