"""Real members of etcd: a quorum and none, one that comes back, one whose data are lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.cluster.host_plan import EtcdMember
from backends.launcher.deployment_watch import state
from backends.launcher.environment import free_ports
from backends.launcher.etcd_member import (
    ask_etcd,
    etcd_binary,
    etcd_command,
    etcd_environment,
    replace_lost_member,
)
from mooncake_store.directory.election import EtcdClient
from mooncake_store.errors import StoreError
from tests.e2e.server import wait_until

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(etcd_binary() is None, reason="etcd is not installed"),
]
NAMES = "abc"


class Members:
    """Three, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = free_ports(6, ())
        self.clients = dict(zip(NAMES, ports[:3], strict=True))
        peers = {name: f"http://127.0.0.1:{port}"
                 for name, port in zip(NAMES, ports[3:], strict=True)}  # fmt: skip
        self.members = {
            name: EtcdMember(
                name=name, listen_client_url=f"http://127.0.0.1:{self.clients[name]}",
                advertised_client_url=f"http://127.0.0.1:{self.clients[name]}",
                listen_peer_url=peers[name], advertised_peer_url=peers[name],
                members=peers, token="test",
            )
            for name in NAMES
        }  # fmt: skip
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoints = [f"127.0.0.1:{port}" for port in self.clients.values()]
        self.client = EtcdClient([f"http://{each}" for each in self.endpoints])

    def start(self, name: str) -> bool:
        """True: it was replaced."""
        others = [f"127.0.0.1:{port}" for other, port in self.clients.items() if other != name]
        data = self.folder / name
        is_replaced = replace_lost_member(self.members[name], data, others)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                etcd_command(self.members[name], data, is_replaced), stdout=log,
                stderr=subprocess.STDOUT, env={**os.environ, **etcd_environment()},
            )  # fmt: skip
        return is_replaced

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def can_decide(self) -> bool:
        try:
            self.client.get("any")
        except StoreError:
            return False
        return True

    def answers(self, name: str) -> bool:
        return f"127.0.0.1:{self.clients[name]}" in ask_etcd(self.endpoints).alive

    def knows(self, name: str) -> bool:
        """Does this member itself answer with what was written?"""
        try:
            alone = EtcdClient([f"http://127.0.0.1:{self.clients[name]}"])
            return alone.get("key").value == b"value"
        except StoreError:
            return False


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    made = Members(tmp_path)
    try:
        for name in "ab":
            assert not made.start(name), "nobody knows it yet"
        wait_until(made.can_decide, "a quorum")
        assert not made.start("c"), "the others wait for it, but it has never been there"
        wait_until(lambda: made.answers("c"), "all of them")
        yield made
    finally:
        for name in made.processes:
            made.kill(name)


def test_a_member_comes_back_with_its_data_and_is_replaced_without(members: Members) -> None:
    assert members.client.write_unless_changed({"key": 0}, {"key": b"value"}, {})
    directory = f"etcd://{','.join(members.endpoints)}/test"
    assert state(directory).said.startswith("no directory leads yet")

    members.kill("a")
    answers = ask_etcd(members.endpoints)
    assert answers.has_quorum and answers.silent == (members.endpoints[0],)
    wait_until(members.can_decide, "the others to go on")
    assert not members.start("a")
    wait_until(lambda: members.knows("a"), "it to take part again")

    members.kill("a")
    shutil.rmtree(members.folder / "a")
    assert members.start("a"), "its data are lost, so it takes part anew"
    wait_until(lambda: members.knows("a"), "it to have what was written")

    members.kill("a")
    members.kill("b")
    now = wait_until(
        lambda: (now := state(directory)).said.startswith("etcd has no quorum") and now,
        "the quorum to be missed",
    )
    assert not now.is_well
    assert "1 of 3 members answer, 2 are needed" in now.said
    assert all(each in now.said for each in members.endpoints[:2])
    members.start("b")
    wait_until(members.can_decide, "a quorum again")
