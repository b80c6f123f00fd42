"""Garbage at ports whose code is not ours: a worker's Triton, and the UCX behind a storage node."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import VARIABLE, Keys
from tests.backends.test_worker_tls import BareTriton, is_live
from tests.doors.garbage import Garbage
from tests.doors.listeners import Listener
from tests.doors.test_garbage import attack, say_from_outside
from tests.mooncake_store.processes import DirectoryProcess, NodeProcess

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(900)]

FRAMES = 10_000


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    authority = Authority.begun(tmp_path / "keys")
    authority.add_host("a")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "keys" / "a"))
    return Keys(tmp_path / "keys" / "a")


@pytest.fixture(params=["mutual TLS", "plain"])
def triton(
    request: pytest.FixtureRequest, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BareTriton]:
    if request.param == "plain":
        monkeypatch.delenv(VARIABLE)
    made = BareTriton(tmp_path / "triton.log", keys if request.param != "plain" else None)
    yield made
    made.close()


def test_garbage_at_tritons_grpc_changes_nothing(triton: BareTriton, seed: int) -> None:
    address = triton.address
    listener = Listener("Triton", triton.process.pid, address, lambda: is_live(address))
    attack(
        listener, lambda garbage, count: say_from_outside(listener, garbage, count), FRAMES, seed
    )


def test_garbage_at_a_nodes_ucx_ports_changes_nothing(tmp_path: Path, seed: int) -> None:
    with DirectoryProcess(tmp_path) as directory:
        node = NodeProcess(tmp_path, directory.address, "s0", 8)
        try:
            process = psutil.Process(node.process.pid)
            ports = sorted(
                {
                    each.laddr.port
                    for each in process.net_connections("tcp")
                    if each.status == psutil.CONN_LISTEN
                }
            )
            assert ports, "UCX listens nowhere: what is its door by now?"
            with DirectoryClient(directory.address) as client:
                for port in ports:
                    attack(
                        Listener(
                            f"UCX port {port}",
                            process.pid,
                            f"127.0.0.1:{port}",
                            lambda: (
                                [info.node_id for info in client.nodes()] == ["s0"]
                                and process.is_running()
                            ),
                        ),
                        lambda garbage, count, to=port: say_to_port(to, garbage, count),
                        FRAMES // len(ports),
                        seed,
                    )
        finally:
            node.close()


def say_to_port(port: int, garbage: Garbage, count: int) -> None:
    for _ in range(count):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=10.0) as peer,
        ):
            peer.sendall(garbage.opening())


def test_ucx_listens_where_it_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a trusted network its ports are on loopback: nobody else can speak to them."""
    monkeypatch.setenv("MOONCAKE_TRUSTED_NICS", "")
    with DirectoryProcess(tmp_path) as directory:
        node = NodeProcess(tmp_path, directory.address, "s0", 8)
        try:
            listening = {
                each.laddr.ip
                for each in psutil.Process(node.process.pid).net_connections("tcp")
                if each.status == psutil.CONN_LISTEN
            }
        finally:
            node.close()
    assert listening <= {"127.0.0.1", "::1"}, f"of process {os.getpid()}'s node: {listening}"
