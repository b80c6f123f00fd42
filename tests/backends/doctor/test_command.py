"""What `mooncake doctor` says before a start."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from backends.cluster.model_rendering import with_parameters
from backends.cluster.rendered_folder import MANIFEST
from backends.doctor import command
from backends.doctor.command import doctor, repository_findings
from backends.doctor.judgement import BROKEN
from backends.doctor.running_check import timed_request
from backends.launcher.environment import EnvironmentProblem, free_ports
from backends.model_settings.running_system import ask_at
from backends.starter.command import lay_down


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


@pytest.fixture
def not_http() -> Iterator[str]:
    """HOST:PORT of a server that answers every connection with a line that is not HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        server = threading.Thread(target=answer)
        server.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


def test_a_port_that_does_not_speak_http_is_reported_without_a_traceback(not_http: str) -> None:
    assert ask_at(f"http://{not_http}/metrics")() is None
    assert "no answer" in timed_request(not_http).problem


def test_a_repository_that_was_rendered_for_one_host_need_not_have_both_roles(
    tmp_path: Path,
) -> None:
    repository = tmp_path / "model_repository"
    (repository / "decode_0" / "1").mkdir(parents=True)
    (tmp_path / MANIFEST).write_text("{}")
    text = Path("model_repository/decode_0/config.pbtxt").read_text()
    found = list(repository_findings(repository, {"decode_0": text}, ("s0", "s1")))
    assert [each.state for each in found] != [BROKEN], found


def test_the_interpreter_of_workers_on_vllm_is_checked_and_its_remedy_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "probe", list)
    lay_down(tmp_path / "models", "vllm")
    for path in (tmp_path / "models").glob("*/config.pbtxt"):
        named = {"engine_python": str(tmp_path / "python")}
        if path.parent.name.startswith(("prefill", "decode")):
            path.write_text(with_parameters(path.read_text(), named))
    (unused,) = free_ports(1, ())
    made = typer.Typer()
    made.command()(doctor)
    arguments = ["--model-repository", str(tmp_path / "models"), "--store-bytes", "16M", "--json"]
    arguments += ["--metrics-url", f"http://127.0.0.1:{unused}/metrics"]
    answer = CliRunner().invoke(made, arguments)
    found = [each for each in json.loads(answer.stdout)["findings"] if each["subject"] == "vllm"]
    assert [each["state"] for each in found] == [BROKEN], "one interpreter, whatever its workers"
    assert "decode_0, decode_1, prefill_0, prefill_1" in found[0]["what"]
    assert "make vllm" in found[0]["remedy"]


def test_a_range_of_ports_without_enough_free_ones_is_named() -> None:
    with pytest.raises(EnvironmentProblem, match=r"3 free ports of .* from 20000"):
        free_ports(3, (), 20_000, 20_002)
