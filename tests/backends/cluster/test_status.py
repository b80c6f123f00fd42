"""Who does not answer is said to be down, with the reason, and soon."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends.cluster.cluster_file import parse
from backends.cluster.command import app
from backends.cluster.operator import INSECURE_VARIABLE
from backends.cluster.status import DOWN, UNKNOWN, fleet_status
from backends.launch_secret import SECRET_VARIABLE
from mooncake_store.keys import folder as keys_folder
from tests.backends.cluster.fleet_text import ONE_HOST


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands put the deployment's secret into their process."""
    for name in (SECRET_VARIABLE, keys_folder.VARIABLE, INSECURE_VARIABLE):
        monkeypatch.setenv(name, "")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_deployment_that_does_not_run_is_down_and_says_why() -> None:
    text = ONE_HOST + f"directories: {{hosts: [here], port: {free_port()}}}\n"
    found = fleet_status(parse(text), f"tcp://127.0.0.1:{free_port()}")
    (host,) = found.hosts
    assert not found.is_well and host.parts["directory"] == DOWN
    assert host.parts["frontend"].startswith(UNKNOWN), "it is on loopback, maybe another machine's"
    assert "StoreUnavailable" in found.problem or "Timeout" in found.problem, found.problem


def test_the_command_ends_with_status_1_where_etcd_does_not_answer(tmp_path: Path) -> None:
    ports = f"client_port: {free_port()}, peer_port: {free_port()}"
    path = tmp_path / "cluster.yaml"
    path.write_text(ONE_HOST + f"etcd: {{hosts: [here], {ports}}}\n")
    ran = CliRunner().invoke(app, ["status", "--cluster", str(path)])
    assert ran.exit_code == 1 and DOWN in ran.output, ran.output
    assert "the directory does not answer" in ran.output
    ran = CliRunner().invoke(app, ["drain", "here", "--cluster", str(path)])
    assert ran.exit_code == 1 and "Traceback" not in ran.output, ran.output


def test_keys_that_are_not_here_are_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(ONE_HOST + "keys: {folder: keys}\n")
    ran = CliRunner().invoke(app, ["status", "--cluster", str(path)])
    assert ran.exit_code == 1 and "has no keys that this user may read" in ran.output, ran.output
