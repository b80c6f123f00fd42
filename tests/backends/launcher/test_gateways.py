"""Who may have a gateway, where it listens, and how its processes are started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends.cluster.cluster_file import parse
from backends.cluster.host_plan import host_plan
from backends.launcher import gateways
from backends.launcher.gateways import Gateways
from backends.launcher.launch_plan import GatewayOptions, HostOptions, ServeOptions, fixed_ports
from backends.tenants import api_keys
from mooncake_store.process.child_processes import Command, GrowingPauses

CLUSTER = """
name: two
hosts: {a: {address: 10.77.0.1}, b: {address: 10.77.0.2}}
storage_nodes: {a0: {host: a, dram: 64M}}
frontends: {hosts: [a], address: 0.0.0.0}
pools:
  prefill: {role: prefill, workers: {a: 1}}
  decode: {role: decode, workers: {a: 1}}
keys: {insecure: true}
"""


def one_machine(folder: Path, address: str = "127.0.0.1", **said: object) -> ServeOptions:
    gateway = GatewayOptions(port=9100, **said)  # type: ignore[arg-type]
    return ServeOptions(folder, address=address, gateway=gateway)


class Recorded:
    """Stands for a child process."""

    def __init__(self, command: Command) -> None:
        self.arguments = command.arguments


def commands(options: ServeOptions | HostOptions, folder: Path) -> list[list[str]]:
    made: list[Recorded] = []

    def make(name: str, command: object, policy: object) -> Recorded:
        assert isinstance(policy, GrowingPauses), "one that dies ends nothing else"
        made.append(Recorded(command()))  # type: ignore[operator]
        return made[-1]

    Gateways(options.plan(folder), {}, make)  # type: ignore[arg-type]
    return [each.arguments for each in made]


def value_of(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_without_a_port_there_is_no_gateway(tmp_path: Path) -> None:
    plan = ServeOptions(tmp_path).plan(tmp_path)
    assert commands(ServeOptions(tmp_path), tmp_path) == []
    assert gateways.problems(plan, {}) == [] and "openai" not in fixed_ports(plan)


def test_processes_share_the_port_and_have_a_page_each(tmp_path: Path) -> None:
    started = commands(one_machine(tmp_path, workers=3), tmp_path)
    assert [value_of(each, "--name") for each in started] == ["gateway-0", "gateway-1", "gateway-2"]
    assert {value_of(each, "--port") for each in started} == {"9100"}
    assert all("--shared" in each for each in started)
    assert len({value_of(each, "--own-metrics-port") for each in started}) == 3
    [alone] = commands(one_machine(tmp_path), tmp_path)
    assert "--shared" not in alone, "a port that somebody has is noticed"
    assert value_of(alone, "--frontend") == "127.0.0.1:8001"


def test_an_address_that_others_reach_wants_keys(tmp_path: Path) -> None:
    plan = one_machine(tmp_path, "0.0.0.0").plan(tmp_path)
    [problem] = gateways.problems(plan, {})
    assert "0.0.0.0:9100" in problem and "--api-keys" in problem
    assert gateways.problems(plan, {api_keys.VARIABLE: "keys.json"}) == []
    assert gateways.problems(plan, {"MOONCAKE_INSECURE": "1"}) == []
    assert gateways.problems(one_machine(tmp_path).plan(tmp_path), {}) == []


def test_a_certificate_wants_its_key_and_both_files(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    found = gateways.problems(one_machine(tmp_path, certificate=certificate).plan(tmp_path), {})
    assert len(found) == 2 and "belong together" in found[0] and str(certificate) in found[1]
    for each in (certificate, key):
        each.write_text("x")
    options = one_machine(tmp_path, certificate=certificate, private_key=key)
    assert gateways.problems(options.plan(tmp_path), {}) == []
    [command] = commands(options, tmp_path)
    assert value_of(command, "--private-key") == str(key)


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_host_of_a_cluster_file_has_one_beside_its_frontend(tmp_path: Path, host: str) -> None:
    deployment = parse(CLUSTER, str(tmp_path / "cluster.yaml"))
    plan = replace(host_plan(deployment, host), metrics="127.0.0.1:8002")
    options = HostOptions(plan, gateway=GatewayOptions(port=9100))
    started = commands(options, tmp_path)
    assert len(started) == (1 if host == "a" else 0)
    if started:
        assert value_of(started[0], "--host") == "0.0.0.0"
        assert value_of(started[0], "--frontend").startswith("127.0.0.1:")
