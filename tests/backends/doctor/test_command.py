"""What `mooncake doctor` says before a start."""

from __future__ import annotations

import json
import socket

import pytest
import typer
from typer.testing import CliRunner

from backends.doctor.command import doctor
from backends.doctor.judgement import BROKEN
from backends.launcher.environment import free_ports


@pytest.mark.servers  # storage nodes, to see how fast bytes move
def test_a_port_that_openais_interface_cannot_have_is_found_before_the_start() -> None:
    made = typer.Typer()
    made.command()(doctor)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        http, grpc, metrics, unused = free_ports(4, (taken,))
        arguments = [
            "--http-port",
            str(http),
            "--grpc-port",
            str(grpc),
            "--metrics-port",
            str(metrics),
            "--metrics-url",
            f"http://127.0.0.1:{unused}/metrics",
            "--store-bytes",
            "16M",
            "--openai-port",
            str(taken),
            "--json",
        ]
        answer = CliRunner().invoke(made, arguments)
    found = [each for each in json.loads(answer.stdout)["findings"] if each["subject"] == "start"]
    assert [each["state"] for each in found] == [BROKEN]
    assert f"openai port 127.0.0.1:{taken} cannot be used" in found[0]["what"]
    assert "--openai-port" in found[0]["what"]
    assert answer.exit_code == 1
