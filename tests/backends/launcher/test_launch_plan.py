"""One launcher, two kinds of plan: of one machine, and of a host of a cluster file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.cluster.cluster_file import parse
from backends.cluster.host_plan import HostPlan, host_plan
from backends.cluster.manifests.firewall import FREE_PORTS
from backends.launcher import launch
from backends.launcher.environment import TritonInstall, problems
from backends.launcher.launch_plan import (
    HostOptions,
    ServeOptions,
    command_of_directory,
    fixed_ports,
)

CLUSTER = """
name: three
hosts:
  a: {address: 10.77.0.1, identity: a, environment: {UCX_TLS: tcp}}
  b: {address: b.example}
  c: {address: 10.77.0.3}
etcd: {hosts: [a, b, c]}
directories: {hosts: [a, b]}
storage_nodes:
  a0: {host: a, dram: 64M, ssd: 1G}
  b0: {host: b, dram: 64M}
frontends: {hosts: [a], address: 0.0.0.0}
pools:
  prefill: {role: prefill, workers: {a: 1, b: 1}}
  decode: {role: decode, workers: {b: 1}}
keys: {insecure: true}
"""


def plan_of(host: str, folder: Path) -> HostPlan:
    return host_plan(parse(CLUSTER, str(folder / "cluster.yaml")), host)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[launch.Launcher]:
    made = launch.Launcher(HostOptions(plan_of("a", tmp_path)))
    yield made
    made.stop()


def value_of(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_one_machine_has_unix_sockets_and_no_etcd_and_its_folders_are_as_ever(
    tmp_path: Path,
) -> None:
    options = ServeOptions(tmp_path, state_dir=tmp_path / "state", http_port=9_000)
    launcher = launch.Launcher(options)
    try:
        plan, sockets = launcher.plan, launcher.socket_dir
        assert plan.directory_address == f"ipc://{sockets}/directory"
        assert plan.events_address == f"ipc://{sockets}/events"
        assert plan.etcd is None and plan.deployment == ""
        assert plan.environment == {"MOONCAKE_TRUSTED_NICS": ""}, "NIXL keeps to the loopback"
        assert [node.control for node in plan.storage_nodes] == [
            f"ipc://{sockets}/s0",
            f"ipc://{sockets}/s1",
        ]
        assert launcher.log_dir == tmp_path / "state" / "logs-9000"
        assert fixed_ports(plan) == {
            "http": ("127.0.0.1", 9_000),
            "grpc": ("127.0.0.1", 8_001),
            "metrics": ("127.0.0.1", 8_002),
        }
        command = launcher._node_command(plan.storage_nodes[0])
        assert value_of(command, "--directory") == f"ipc://{sockets}/directory"
        assert value_of(command, "--events") == f"ipc://{sockets}/events"
        assert value_of(command, "--control") == f"ipc://{sockets}/s0"
        assert not {"--data", "--advertise", "--ssd-path"} & set(command)
        assert "--etcd" not in command_of_directory(launcher.plan)
    finally:
        launcher.stop()


def test_one_machine_keeps_its_inboxes_to_itself_whatever_the_shell_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_ADDRESS", "10.77.0.1")
    monkeypatch.setenv("MOONCAKE_PEERS", "*")
    launcher = launch.Launcher(ServeOptions(tmp_path, state_dir=tmp_path / "state"))
    try:
        env = launcher._environment(TritonInstall(tmp_path, tmp_path, tmp_path, ()))
        assert not {"MOONCAKE_ADDRESS", "MOONCAKE_PEERS"} & env.keys()
    finally:
        launcher.stop()


def test_a_host_s_ports_are_those_of_its_part(tmp_path: Path) -> None:
    assert {name: port for name, (_, port) in fixed_ports(plan_of("a", tmp_path)).items()} == {
        "metrics": 8_002,
        "http": 8_000,
        "grpc": 8_001,
        "etcd": 2_379,
        "etcd peer": 2_380,
        "directory": 7_001,
        "directory events": 7_002,
        "a0 control": 7_010,
        "a0 data": 7_011,
        "prefill_a_0": 7_100,
    }
    named = fixed_ports(plan_of("b", tmp_path))
    assert named["directory"] == ("0.0.0.0", 7_001), "what is bound, not the name that others use"
    assert set(fixed_ports(plan_of("c", tmp_path))) == {"metrics", "etcd", "etcd peer"}


def test_nodes_and_directories_of_a_host_listen_where_others_reach_them(
    launcher: launch.Launcher,
) -> None:
    [node] = launcher.plan.storage_nodes
    command = launcher._node_command(node)
    election = "etcd://10.77.0.1:2379,b.example:2379,10.77.0.3:2379/mooncake/three/directory"
    assert value_of(command, "--directory") == election
    assert value_of(command, "--events") == "", "the leader says where"
    assert value_of(command, "--control") == "tcp://10.77.0.1:7010"
    assert value_of(command, "--advertise") == "tcp://10.77.0.1:7010,10.77.0.1:7011"
    assert value_of(command, "--ssd-path") == str(launcher.state_dir / "ssd" / "a0")
    command = command_of_directory(launcher.plan)
    assert value_of(command, "--etcd") == election
    assert value_of(command, "--advertise") == "tcp://10.77.0.1:7001,tcp://10.77.0.1:7002"


def test_a_worker_of_the_plan_is_called_at_its_port_and_a_copied_one_at_any(
    launcher: launch.Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prefill_a_0", "prefill_a_9"):
        launcher._add_worker(name)
    monkeypatch.setattr(
        "backends.launcher.triton_process.free_ports", lambda *at: [11_111 if at[2:] else 11_112]
    )
    for worker in launcher.workers.values():
        worker._command_of = lambda triton, endpoints: endpoints  # type: ignore[assignment]
    planned, copied = (launcher.workers[name]._command() for name in ("prefill_a_0", "prefill_a_9"))
    assert (planned.called, planned.metrics) == ("10.77.0.1:7100", "127.0.0.1:11112")  # type: ignore[attr-defined]
    assert copied.called == "10.77.0.1:11111"  # type: ignore[attr-defined]
    assert launcher.workers["prefill_a_9"]._setup.ports == FREE_PORTS, "firewalls leave it open"


def test_a_copied_worker_listens_where_its_host_does_and_is_called_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CLUSTER.replace("{address: 10.77.0.1,", "{address: 10.77.0.1, listen: 0.0.0.0,")
    made = launch.Launcher(HostOptions(host_plan(parse(text, str(tmp_path / "c.yaml")), "a")))
    try:
        made._add_worker("prefill_a_9")
        worker = made.workers["prefill_a_9"]
        worker._command_of = lambda triton, endpoints: endpoints  # type: ignore[assignment,return-value]
        endpoints = worker._command()
        host, _, port = endpoints.grpc.partition(":")  # type: ignore[attr-defined]
        assert host == "0.0.0.0"
        assert endpoints.called == f"10.77.0.1:{port}"  # type: ignore[attr-defined]
    finally:
        made.stop()


def test_processes_of_all_hosts_know_each_other_s_messages(
    tmp_path: Path, launcher: launch.Launcher
) -> None:
    other = launch.Launcher(HostOptions(plan_of("b", tmp_path)))
    try:
        assert launcher._secret() == other._secret() != ""
        assert launcher.plan.environment["MOONCAKE_PEERS"] == "10.77.0.1,b.example,10.77.0.3"
        assert launcher.plan.environment["MOONCAKE_HOST_IDENTITY"] == "a"
        assert other.plan.environment["MOONCAKE_LISTEN"] == "0.0.0.0"
    finally:
        other.stop()


def test_a_plan_of_another_machine_is_refused_with_the_address_that_is_missing(
    tmp_path: Path,
) -> None:
    triton = TritonInstall(tmp_path, tmp_path, tmp_path, ())
    ports = {"etcd": ("192.0.2.1", 2_379), "metrics": ("127.0.0.1", 0)}
    found = "\n".join(problems(triton, ports, 0, 0, "dram", "in the cluster file"))
    assert "etcd port 192.0.2.1:2379 cannot be used: this machine has no address" in found
