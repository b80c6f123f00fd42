"""Two hosts with two network cards each, in namespaces of this machine: cards are cut and heal.

Real agents, real links. A link is slowed down, so that a read lasts long enough to be cut in its
middle, which the reader itself announces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.harness.fleet.faults import NetworkFault
from loadtest.harness.fleet.namespaces import Namespaces, why_no_namespaces
from mooncake_store.transports.nixl_agent import NixlUnavailable, load_nixl

MB = 2**20
ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.servers
START_S_MAX, ANSWER_S_MAX = 60.0, 60.0
SLOW = 8e6  # bytes/s of each link


class Spoken:
    """A process that says JSON lines."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log.open("wb")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, cwd=ROOT,
            env={**os.environ, **environment}, text=True,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait(5)}: {Path(self.log.name).read_text()[-2000:]}"
        return line

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.log.close()


class TwoHosts:
    """A directory and node b0 on host b, clients on host a."""

    def __init__(self, folder: Path, more: dict[str, str]) -> None:
        self.folder, self._closers = folder, []
        self.more = more
        self.network = Namespaces(("a", "b"), links=2)
        self._closers.append(self.network.close)
        self.directory = f"tcp://{self.network.address('b')}:7001"
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def start(self, host: str, name: str, *words: str) -> Spoken:
        command = self.network.command(host, [sys.executable, "-m", *words])
        environment = {
            "MOONCAKE_HOST_IDENTITY": host, "MOONCAKE_INSECURE": "1", **self.more,
        }  # fmt: skip
        made = Spoken(command, environment, self.folder / f"{name}.log")
        self._closers.append(made.close)
        return made

    def _start(self) -> None:
        directory = self.start(
            "b", "directory", "mooncake_store.directory", "--address", self.directory,
            "--events", self.directory.replace("7001", "7002"),
        )  # fmt: skip
        directory.line()
        self.segment = f"/dev/shm/mooncake-test-nics-{os.getpid()}"
        self.node = self.start(
            "b", "node", "mooncake_store.node", "--node-id", "b0", "--directory", self.directory,
            "--segment-bytes", str(256 * MB), "--segment-path", self.segment,
            "--data", f"{self.network.address('b')}:7003",
        )  # fmt: skip
        assert self.node.line().startswith("ready")
        self.client = Client(self)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()


class Client:
    """On host a."""

    def __init__(self, hosts: TwoHosts) -> None:
        module = "tests.mooncake_store.transports.nic_client"
        self.spoken = hosts.start("a", "client", module, hosts.directory)
        assert self.answer() == {"ready": True}

    def answer(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.spoken.line())
        return said

    def ask(
        self, verb: str, under_way: Callable[[], object] = lambda: None, **fields: object
    ) -> dict[str, Any]:
        """The answer; `under_way` is called once bytes have come over every card."""
        assert self.spoken.process.stdin is not None
        self.spoken.process.stdin.write(json.dumps({"verb": verb, **fields}) + "\n")
        self.spoken.process.stdin.flush()
        answer = self.answer()
        if "under_way" in answer:
            under_way()
            answer = self.answer()
        return answer

    def nics(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = self.ask("counters")["nics"]
        return found

    def wait_for(self, what: Callable[[dict[str, dict[str, int]]], bool]) -> None:
        until_s = time.monotonic() + ANSWER_S_MAX
        while not what(self.nics()):
            assert time.monotonic() < until_s, self.nics()


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    if why := why_no_namespaces():
        pytest.skip(why)
    try:
        load_nixl()
    except NixlUnavailable as error:
        pytest.skip(str(error))
    made = TwoHosts(tmp_path, getattr(request, "param", {}))
    yield made
    made.close()


def test_a_card_that_is_cut_in_the_middle_of_a_read_costs_a_second_and_comes_back(
    hosts: TwoHosts,
) -> None:
    numbers, size_bytes, deadline_s = list(range(16)), MB, 6.0
    client, network = hosts.client, hosts.network
    stored = client.ask("put", numbers=numbers, size_bytes=size_bytes, deadline_s=20.0)
    assert all(stored["stored"])
    read = {"numbers": numbers, "size_bytes": size_bytes, "deadline_s": deadline_s}
    before = client.nics()
    with network.rate("b", SLOW, "e0"), network.rate("b", SLOW, "e1"):
        faults: list[NetworkFault] = []
        cut = lambda: faults.append(network.link("a", link="e1"))  # noqa: E731
        answer = client.ask("get", under_way=cut, **read)
    assert all(answer["came"]) and not answer["wrong"]
    assert answer["seconds"] < deadline_s + 1.0
    after = client.nics()
    moved = {name: after[name]["read_bytes"] - before[name]["read_bytes"] for name in after}
    assert moved["e0"] > moved["e1"] > 0, moved
    assert after["e1"]["resting"] == 1 and after["e0"]["resting"] == 0
    again = client.ask("get", **read)  # with the card cut: nothing waits for it
    assert all(again["came"]) and not again["wrong"]
    faults.pop().undo()
    client.wait_for(lambda nics: nics["e1"]["resting"] == 0)
    healed = client.nics()
    last = client.ask("get", **read)
    assert all(last["came"]) and not last["wrong"]
    assert client.nics()["e1"]["read_bytes"] > healed["e1"]["read_bytes"]
    assert client.ask("counters")["pending"] == 0
