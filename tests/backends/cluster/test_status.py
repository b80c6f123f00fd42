"""Who does not answer is said to be down, with the reason, and soon."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends.cluster.cluster_file import load, parse
from backends.cluster.command import app
from backends.cluster.host_plan import directory_address, host_plan
from backends.cluster.status import DOWN, UNKNOWN, FleetStatus, fleet_status
from backends.launch_secret import SECRET_VARIABLE
from mooncake_store.cli.serving import directory_command
from mooncake_store.keys import folder as keys_folder
from mooncake_store.keys.curve import INSECURE_VARIABLE
from tests.backends.cluster.fleet_text import ONE_HOST
from tests.mooncake_store.etcd_process import BINARY, HOW_TO, EtcdProcess


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
    assert not found.is_well and host.parts["directory"].startswith(DOWN)
    assert host.parts["frontend"].startswith(UNKNOWN), "it is on loopback, maybe another machine's"
    assert "StoreUnavailable" in found.problem or "Timeout" in found.problem, found.problem


class FrontendOf(BaseHTTPRequestHandler):
    """Triton's HTTP port, with a conductor that does not reach one worker."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v2/models/conductor/generate" and asked["describe"] is True
        facts = {"unreached_workers": {"decode_here_0": "its certificate has expired"}}
        self._answer({"text_output": json.dumps(facts)})

    def _answer(self, body: dict[str, str]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None: ...


def test_a_worker_that_a_frontend_does_not_reach_is_named_with_its_cause() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), FrontendOf) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = ONE_HOST + (
            f"directories: {{hosts: [here], port: {free_port()}}}\n"
            f"frontends: {{hosts: [here], address: 0.0.0.0, http_port: {server.server_port}}}\n"
            "keys: {insecure: true}\n"
        )
        found = fleet_status(parse(text), f"tcp://127.0.0.1:{free_port()}")
        server.shutdown()
    (host,) = found.hosts
    assert host.parts["frontend to decode_here_0"] == f"{DOWN}: its certificate has expired"


class AnswerOfSsh(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"SSH-2.0-server\r\n")


def test_a_port_of_another_service_is_down() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), AnswerOfSsh) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        frontends = f"frontends: {{hosts: [here], address: 0.0.0.0, http_port: {port}}}\n"
        text = ONE_HOST + frontends + "keys: {insecure: true}\n"
        found = fleet_status(parse(text), f"tcp://127.0.0.1:{free_port()}")
        server.shutdown()
    assert found.hosts[0].parts["frontend"] == f"{DOWN}: SSH-2.0-server"


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


TWO_HOSTS = """\
name: two
hosts: {{a: {{address: 127.0.0.1}}, b: {{address: 127.0.0.2}}}}
etcd: {{endpoints: ["127.0.0.1:{etcd}"]}}
directories: {{hosts: [a, b], port: {port}, events_port: {events}, ttl_s: 1}}
frontends: {{hosts: []}}
"""


@pytest.mark.servers
@pytest.mark.skipif(BINARY is None, reason=HOW_TO)
def test_a_directory_that_waited_for_its_turn_is_missed_when_it_dies(tmp_path: Path) -> None:
    with contextlib.ExitStack() as running:
        etcd = EtcdProcess(tmp_path)
        running.callback(etcd.close)
        path = tmp_path / "cluster.yaml"
        path.write_text(TWO_HOSTS.format(etcd=etcd.port, port=free_port(), events=free_port()))
        deployment = load(path)
        address = directory_address(deployment)

        def start(host: str) -> subprocess.Popen[bytes]:
            plan = host_plan(deployment, host).directory
            assert plan is not None
            command = directory_command(
                plan.listen,
                plan.listen_events,
                "--etcd",
                plan.etcd,
                "--ttl-s",
                "1",
                "--advertise",
                f"{plan.advertised},{plan.advertised_events}",
            )
            started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            running.callback(started.wait)
            running.callback(started.kill)
            return started

        def until(parts: list[str]) -> FleetStatus:
            give_up_s = time.monotonic() + 60
            while True:
                found = fleet_status(deployment, address)
                if [host.parts["directory"] for host in found.hosts[:2]] == parts:
                    return found
                assert time.monotonic() < give_up_s, found
                time.sleep(0.1)  # poll

        start("a")
        until(["leads", f"{DOWN}: neither leads nor waits to"])
        standby = start("b")
        assert until(["leads", "waits"]).is_well
        standby.kill()
        found = until(["leads", f"{DOWN}: neither leads nor waits to"])
        assert not found.is_well and not found.problem
        ran = CliRunner().invoke(app, ["status", "--cluster", str(path)])
        assert ran.exit_code == 1, ran.output
        assert f"b: directory: {DOWN}: neither leads nor waits to" in ran.output.splitlines()
        standby = start("b")
        assert until(["leads", "waits"]).is_well
        standby.terminate()
        standby.wait()
        assert not fleet_status(deployment, address).is_well, "one that is stopped says so at once"
        etcd.close()
        (_, _, member) = fleet_status(deployment, address).hosts
        assert member.down and member.down[0].startswith(f"127.0.0.1:{etcd.port}: etcd: {DOWN}")
