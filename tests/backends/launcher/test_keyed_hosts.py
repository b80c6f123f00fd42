"""Three hosts with keys, each a real `mooncake serve`: etcd, directories and storage nodes, without
workers. Each has a loopback address of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backends.launcher.environment import EnvironmentProblem, find_triton, free_ports
from backends.launcher.etcd_member import ask_etcd, etcd_binary
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import VARIABLE
from tests.e2e.server import wait_until

NAMES = "abc"
READY_S_MAX, RENEWED_S_MAX = 120.0, 120.0
FILE = """
name: keyed
hosts:
  a: {{address: 127.0.0.1}}
  b: {{address: 127.0.0.2}}
  c: {{address: 127.0.0.3}}
etcd: {{hosts: [a, b, c], client_port: {client}, peer_port: {peer}}}
directories: {{hosts: [a, b], port: {directory}, events_port: {events}}}
storage_nodes:
  a0: {{host: a, dram: 16M, control_port: {control}, data_port: {data}}}
  b0: {{host: b, dram: 16M, control_port: {control}, data_port: {data}}}
  c0: {{host: c, dram: 16M, control_port: {control}, data_port: {data}}}
frontends: {{hosts: [], metrics_port: {metrics}}}
keys: {{folder: keys}}
"""


class KeyedHosts:
    """This process has the keys of a host on which nothing runs."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.folder, self.authority = folder, authority
        names = ("client", "peer", "directory", "events", "control", "data")
        *ports, a, b, c = free_ports(len(names) + len(NAMES), ())
        named = dict(zip(names, ports, strict=True))
        for host, metrics in zip(NAMES, (a, b, c), strict=True):  # all of them on loopback
            (folder / f"{host}.yaml").write_text(FILE.format(**named, metrics=metrics))
        self.endpoints = [f"127.0.0.{n}:{named['client']}" for n in (1, 2, 3)]
        self.address = f"etcd://{','.join(self.endpoints)}/mooncake/keyed/directory"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str) -> None:
        command = [
            sys.executable,
            "-m",
            "backends.cli",
            "serve",
            "--cluster",
            str(self.folder / f"{host}.yaml"),
            "--host",
            host,
        ]
        env = {key: value for key, value in os.environ.items() if key != VARIABLE}
        with (self.folder / f"{host}.log").open("ab") as log:
            self.processes[host] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def said(self, host: str) -> str:
        return (self.folder / f"{host}.log").read_text(errors="replace")

    def is_ready(self, host: str) -> bool:
        assert self.processes[host].poll() is None, self.said(host)
        return "ready after" in self.said(host)

    def members(self) -> set[int]:
        """The processes of etcd."""
        found = set()
        for launcher in self.processes.values():
            for child in psutil.Process(launcher.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):  # it ends while we look
                    if child.name() == "etcd":
                        found.add(child.pid)
        return found

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            process.wait(timeout=60.0)


def why_not() -> str:
    try:
        find_triton()
    except EnvironmentProblem as problem:
        return str(problem)
    return "" if etcd_binary() else "etcd is not installed"


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyedHosts]:
    if reason := why_not():
        pytest.skip(reason)
    authority = Authority.begun(tmp_path / "keys")
    for number, host in enumerate(NAMES, 1):
        authority.add_host(host, address=f"127.0.0.{number}")
    authority.add_host("outside")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "keys" / "outside"))
    made = KeyedHosts(tmp_path, authority)
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.servers
@pytest.mark.long
@pytest.mark.timeout(600)
def test_members_of_etcd_are_started_again_in_turns_and_the_directory_serves_on(
    hosts: KeyedHosts,
) -> None:
    hosts.authority.state.addresses["b"] = ""  # as keys that were made before they knew any
    hosts.authority.add_host("b")
    for host in NAMES:
        hosts.start(host)
    wait_until(lambda: hosts.processes["b"].poll() is not None, "b to refuse its keys", READY_S_MAX)
    assert "mooncake keys add-host FOLDER b=127.0.0.2" in " ".join(hosts.said("b").split())
    hosts.authority.add_host("b", address="127.0.0.2")
    hosts.start("b")
    for host in NAMES:
        wait_until(lambda host=host: hosts.is_ready(host), f"{host} to serve", READY_S_MAX)
    with DirectoryClient(hosts.address, timeout_s=10.0) as client:
        for step in ("prepare", "switch", "retire"):
            before = hosts.members()
            assert len(before) == len(NAMES) and hosts.authority.rotate() == step
            if step != "switch":
                wait_until(
                    lambda before=before: is_served(client) and is_renewed(hosts, before),
                    f"members that were started after {step}",
                    RENEWED_S_MAX,
                )
            else:
                assert hosts.members() == before
            wait_until(lambda: is_served(client), "all nodes at a directory", READY_S_MAX)


def is_served(client: DirectoryClient) -> bool:
    """Are all nodes in the directory? Now and then another one begins to lead."""
    with contextlib.suppress(StoreError):
        return {info.node_id for info in client.nodes()} == {"a0", "b0", "c0"}
    return False


def is_renewed(hosts: KeyedHosts, before: set[int]) -> bool:
    """Is each member another process, and answers?"""
    now = hosts.members()
    return not now & before and len(ask_etcd(hosts.endpoints).alive) == len(NAMES)
