"""Workers' gRPC with mutual TLS, on a bare Triton: accepted clients, and what the others read."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends import worker_tls
from backends.launcher.environment import find_triton, free_ports
from backends.launcher.triton_arguments import listening
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import VARIABLE, Keys

OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of hosts a, b and `expired`; `stranger` is a host of another cluster."""
    made = tmp_path_factory.mktemp("keys")
    ours = Authority.begun(made)
    for host in ("a", "b"):
        ours.add_host(host)
    ours.add_host("expired", days=-1)
    Authority.begun(made / "other").add_host("stranger")
    return made


def place(folder: Path, host: str) -> Path:
    return folder / "other" / host if host == "stranger" else folder / host


class BareTriton:
    """Without models."""

    def __init__(self, log: Path, keys: Keys | None) -> None:
        install = find_triton()
        grpc_port, metrics_port = free_ports(2, set())
        self.address = f"127.0.0.1:{grpc_port}"
        repository = log.with_suffix(".models")
        repository.mkdir()
        libraries = ":".join(str(each) for each in install.library_folders)
        self.arguments = [
            str(install.server),
            f"--model-repository={repository}",
            "--allow-http=false",
            *listening("grpc", self.address),
            *listening("metrics", f"127.0.0.1:{metrics_port}"),
            "--allow-gpu-metrics=false",
            *worker_tls.server_arguments(keys),
        ]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                self.arguments,
                stdout=file,
                stderr=file,
                env=os.environ | {"LD_LIBRARY_PATH": libraries},
            )
        self._wait()

    def _wait(self) -> None:
        host, _, port = self.address.rpartition(":")
        for _ in range(600):
            assert self.process.poll() is None, "Triton ended"
            try:
                socket.create_connection((host, int(port)), 1.0).close()
                return
            except OSError:
                subprocess.run(["sleep", "0.05"], check=True)  # poll
        raise AssertionError("Triton does not listen")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Keys | None], BareTriton]]:
    running: list[BareTriton] = []

    def make(keys: Keys | None) -> BareTriton:
        running.append(BareTriton(tmp_path / f"{len(running)}.log", keys))
        return running[-1]

    yield make
    for each in running:
        each.close()


def is_live(address: str) -> bool:
    with worker_tls.worker_channel(address, OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool(stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=PATIENCE_S).live)


def refused(address: str) -> str:
    """The details of how the call fails."""
    with pytest.raises(grpc.RpcError) as failed:
        is_live(address)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(failed.value.details())


@pytest.mark.servers
def test_only_hosts_of_the_cluster_are_served(
    folder: Path, start: Callable[[Keys | None], BareTriton], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = start(Keys(folder / "a"))
    for host in ("b", "stranger", "expired", "", "b"):
        if host:
            monkeypatch.setenv(VARIABLE, str(place(folder, host)))
        else:
            monkeypatch.delenv(VARIABLE)
        if host == "b":
            assert is_live(triton.address)
            continue
        details = refused(triton.address)
        # As if the Triton were on another host: on this one a plain client is never refused.
        error = worker_tls.refusal("10.0.0.1:1", details)
        assert error is not None and "mooncake keys check" in str(error), (host, details)
        assert "10.0.0.1" in str(error)
    secret = (folder / "a" / "host.key").read_text()
    arguments = Path(f"/proc/{triton.process.pid}/cmdline").read_text()
    assert "host.key" in arguments and secret.splitlines()[1] not in arguments


@pytest.mark.servers
@pytest.mark.parametrize("server", ["stranger", "expired", ""])
def test_a_triton_that_is_not_of_the_cluster_is_not_believed(
    folder: Path,
    start: Callable[[Keys | None], BareTriton],
    monkeypatch: pytest.MonkeyPatch,
    server: str,
) -> None:
    triton = start(Keys(place(folder, server)) if server else None)
    monkeypatch.setenv(VARIABLE, str(folder / "b"))
    error = worker_tls.refusal(triton.address, refused(triton.address))
    assert error is not None and triton.address in str(error)


def test_a_triton_that_dies_is_no_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses us ends the connection while it is made, before anything is sent."""
    in_a_call, at_first = "Stream removed (Socket closed)", "failed to connect: Socket closed"
    nobody = "failed to connect: Connection refused"
    assert worker_tls.refusal("127.0.0.1:1", at_first) is None
    assert worker_tls.refusal("10.0.0.1:1", in_a_call) is None
    monkeypatch.setenv(VARIABLE, str(folder / "b"))
    assert worker_tls.refusal("127.0.0.1:1", in_a_call) is None
    assert worker_tls.refusal("127.0.0.1:1", nobody) is None
    assert worker_tls.refusal("127.0.0.1:1", at_first) is not None


def test_without_keys_triton_gets_no_argument_more() -> None:
    assert worker_tls.server_arguments(None) == []
