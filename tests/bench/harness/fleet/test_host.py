"""What runs on a host is found by kind, killed and frozen; a launcher's part of it, waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench.harness.fleet import FleetHost, HostProcesses, Namespaces, why_no_namespaces
from bench.harness.fleet.host import kind_of
from loadtest.harness.server import ServerFailed
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from tests.bench.harness.fleet.sockets import WAIT_S_MAX

needs_namespaces = pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
MIB = 2**20


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prefill_a_0", "prefill"),
        ("decode_0", "decode"),
        ("triton frontend", "frontend"),
        ("triton decode_0", "triton"),
        ("node a0", "node"),
        ("directory", "directory"),
        ("etcd", "etcd"),
        ("conductor", "conductor"),
        ("launcher", "launcher"),
        ("preprocessing", ""),
        ("python3", ""),
        ("prefill", "prefill"),
        ("", ""),
    ],
)
def test_a_process_has_a_kind_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def wait_until(holds: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + WAIT_S_MAX
    while not holds():
        assert time.monotonic() < until_s, f"not in {WAIT_S_MAX:g} s: {what}"
        time.sleep(0.02)  # poll


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with Namespaces(("a", "b")) as made:
        yield made


@pytest.fixture
def store(hosts: Namespaces, tmp_path: Path) -> Iterator[DirectoryClient]:
    """A directory on a, a node on each."""
    directory = f"tcp://{hosts.address('a')}:7001"
    begin(
        hosts,
        "a",
        tmp_path,
        "directory",
        "--address",
        directory,
        "--events",
        f"tcp://{hosts.address('a')}:7002",
        "--node-ttl-s",
        "2",
    )
    for host in hosts.hosts:
        begin_node(hosts, host, tmp_path)
    client = DirectoryClient(directory, timeout_s=1.0)
    wait_until(lambda: nodes_of(client) == {"a0", "b0"}, "both nodes registered")
    yield client
    client.close()


def begin(hosts: Namespaces, host: str, folder: Path, module: str, *arguments: str) -> None:
    variables = {"MOONCAKE_INSECURE": "1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "e0"}
    command = hosts.command(host, [sys.executable, "-m", f"mooncake_store.{module}", *arguments])
    with (folder / f"{host}.log").open("a") as log:
        subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)


def begin_node(hosts: Namespaces, host: str, folder: Path) -> None:
    begin(
        hosts,
        host,
        folder,
        "node",
        "--node-id",
        f"{host}0",
        "--directory",
        f"tcp://{hosts.address('a')}:7001",
        "--segment-bytes",
        str(8 * MIB),
        "--segment-path",
        str(folder / f"segment-{host}"),
        "--mapped-only",
    )


def nodes_of(client: DirectoryClient) -> set[str]:
    try:
        return {node.node_id for node in client.stats().nodes if node.is_open}
    except StoreError:
        return set()


@needs_namespaces
@pytest.mark.servers
def test_processes_of_a_store_are_found_by_kind_or_name_on_their_own_host(
    hosts: Namespaces, store: DirectoryClient
) -> None:
    a, b = HostProcesses(hosts, "a"), HostProcesses(hosts, "b")
    assert [len(each.processes("directory")) for each in (a, b)] == [1, 0]
    assert a.processes("node") == a.processes("a0") != b.processes("b0")
    assert b.processes("a0") == b.processes("prefill") == []


@needs_namespaces
@pytest.mark.servers
def test_a_killed_node_is_gone_and_everything_else_of_the_host_lives(
    hosts: Namespaces, store: DirectoryClient, tmp_path: Path
) -> None:
    a = HostProcesses(hosts, "a")
    directory = a.processes("directory")
    (pid,) = a.kill("node")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert a.processes("node") == [] and a.processes("directory") == directory
    wait_until(lambda: nodes_of(store) == {"b0"}, "the directory missed a0")
    begin_node(hosts, "a", tmp_path)
    wait_until(lambda: nodes_of(store) == {"a0", "b0"}, "a0 came again")
    assert a.kill("etcd") == []


@needs_namespaces
@pytest.mark.servers
def test_a_frozen_directory_answers_again_when_it_goes_on(
    hosts: Namespaces, store: DirectoryClient
) -> None:
    a = HostProcesses(hosts, "a")
    with a.freeze("directory") as frozen:
        assert [each.status() for each in frozen.processes] == [psutil.STATUS_STOPPED]
        assert nodes_of(store) == set()
        assert len(a.processes("directory")) == 1
    wait_until(lambda: nodes_of(store) == {"a0", "b0"}, "both nodes known again")


@needs_namespaces
@pytest.mark.servers
def test_a_host_without_power_runs_nothing(hosts: Namespaces, store: DirectoryClient) -> None:
    b = HostProcesses(hosts, "b")
    b.freeze("node")  # what stands still dies too
    b.kill_all()
    assert b.named() == [] and hosts.pids("b") == []
    wait_until(lambda: nodes_of(store) == {"a0"}, "the directory missed b0")


@needs_namespaces
@pytest.mark.servers
def test_a_node_whose_link_is_down_is_missed_and_comes_back_by_itself(
    hosts: Namespaces, store: DirectoryClient
) -> None:
    with hosts.link("b", up=False):
        wait_until(lambda: nodes_of(store) == {"a0"}, "the directory missed b0")
    wait_until(lambda: nodes_of(store) == {"a0", "b0"}, "b0 came back")


@needs_namespaces
@pytest.mark.servers
def test_a_launcher_that_refuses_its_file_says_so_at_once(
    hosts: Namespaces, tmp_path: Path
) -> None:
    host = FleetHost(hosts, "a", tmp_path / "no-such-cluster.yaml", tmp_path / "a.log")
    host.start()
    with pytest.raises(ServerFailed, match="host a ended"):
        host.wait_ready(WAIT_S_MAX)
    assert host.stop() != 0 and not host.is_running
