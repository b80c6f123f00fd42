"""Real members of etcd: a quorum and none, one that comes back, one whose data are lost; and with
keys, which clients are accepted, and keys that are renewed while they serve."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from backends.cluster.host_plan import EtcdMember
from backends.launcher.deployment_watch import state
from backends.launcher.environment import free_ports
from backends.launcher.etcd_member import (
    ask_etcd,
    etcd_binary,
    etcd_command,
    etcd_environment,
    member_serves,
    replace_lost_member,
)
from mooncake_store.directory.etcd import EtcdAccessRefused, EtcdClient, etcd_url
from mooncake_store.errors import AccessRefused, StoreError, StoreUnavailable
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import VARIABLE, Keys
from mooncake_store.keys.tls import certificate_problems
from tests.e2e.server import wait_until

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(etcd_binary() is None, reason="etcd is not installed"),
]
NAMES = "abc"


class Members:
    """On loopback; with the keys of their hosts where this process has some."""

    def __init__(self, folder: Path, names: str = NAMES, keys: Path | None = None) -> None:
        self.folder, self.keys = folder, keys
        ports = free_ports(2 * len(names), ())
        self.clients = dict(zip(names, ports[: len(names)], strict=True))
        urls = {name: etcd_url(f"127.0.0.1:{port}") for name, port in self.clients.items()}
        peers = {
            name: etcd_url(f"127.0.0.1:{port}")
            for name, port in zip(names, ports[len(names) :], strict=True)
        }
        self.members = {
            name: EtcdMember(
                name=name,
                listen_client_url=urls[name],
                advertised_client_url=urls[name],
                listen_peer_url=peers[name],
                advertised_peer_url=peers[name],
                initial_cluster=",".join(f"{each}={url}" for each, url in peers.items()),
                token="test",
            )
            for name in names
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoints = [f"127.0.0.1:{port}" for port in self.clients.values()]
        self.client = EtcdClient(list(urls.values()))

    def replace_lost(self, name: str) -> bool:
        others = [f"127.0.0.1:{port}" for other, port in self.clients.items() if other != name]
        return replace_lost_member(self.members[name], self.folder / name, others)

    def start(self, name: str) -> bool:
        """True: it was replaced."""
        data, is_replaced = self.folder / name, self.replace_lost(name)
        keys = None if self.keys is None else Keys(self.keys / name)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                etcd_command(self.members[name], data, is_replaced, keys),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **etcd_environment()},
            )
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
            return self.alone(name).get("key").value == b"value"
        except StoreError:
            return False

    def alone(self, name: str) -> EtcdClient:
        """This member, as this process calls it now."""
        return EtcdClient([etcd_url(f"127.0.0.1:{self.clients[name]}")])

    def end(self) -> None:
        for name in self.processes:
            self.kill(name)


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
        made.end()


def test_a_member_comes_back_with_its_data_and_is_replaced_without(members: Members) -> None:
    assert members.client.write_unless_changed({"key": 0}, {"key": b"value"}, {})
    directory = f"etcd://{','.join(members.endpoints)}/test"
    assert state(directory).text.startswith("no directory leads yet")

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
        lambda: (now := state(directory)).text.startswith("etcd has no quorum") and now,
        "the quorum to be missed",
    )
    assert not now.is_well
    assert "1 of 3 members answer, 2 are needed" in now.text
    assert all(each in now.text for each in members.endpoints[:2])
    members.start("b")
    wait_until(members.can_decide, "a quorum again")


@pytest.mark.parametrize("left", ["", "a", "a/member/snap"])
def test_a_member_whose_start_was_cut_short_takes_part_at_the_next(
    members: Members, left: str
) -> None:
    """The launcher died when the others knew the member anew, or etcd had made a folder or two."""
    assert members.client.write_unless_changed({"key": 0}, {"key": b"value"}, {})
    members.kill("a")
    shutil.rmtree(members.folder / "a")
    wait_until(members.can_decide, "the others to go on")
    assert members.replace_lost("a"), "and here its launcher dies"
    if left:
        (members.folder / left).mkdir(parents=True)
    assert members.start("a"), "it is to take part anew, as before"
    wait_until(lambda: members.knows("a"), "it to have what was written")
    listed = requests.post(
        f"http://{members.endpoints[0]}/v3/cluster/member/list", json={}, timeout=5.0
    ).json()["members"]
    assert sorted(each["name"] for each in listed) == list(NAMES), "nobody was added twice"


# ---- with keys


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """This process is a host on which no member runs."""
    made = Authority.begun(tmp_path / "keys")
    for name in NAMES:
        made.add_host(name, address="127.0.0.1")
    made.add_host("outside")
    Authority.begun(tmp_path / "other").add_host("stranger")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "keys" / "outside"))
    return made


@pytest.fixture
def member(authority: Authority, tmp_path: Path) -> Iterator[Members]:
    """One, with keys."""
    made = Members(tmp_path, "a", authority.path)
    try:
        made.start("a")
        wait_until(made.can_decide, "it to serve")
        yield made
    finally:
        made.end()


def test_a_member_with_keys_serves_hosts_of_the_cluster(member: Members) -> None:
    assert member.client.write_unless_changed({"key": 0}, {"key": b"value"}, {})
    assert member.knows("a") and ask_etcd(member.endpoints).has_quorum
    assert member_serves(member.members["a"])
    lease, _ = member.client.grant(5)
    assert member.client.keep_alive(lease) > 0


@pytest.mark.parametrize(
    ("folder", "cause"),
    [
        ("other/stranger", "of another cluster"),
        ("", "requires a certificate, and this process has none: set MOONCAKE_KEYS"),
    ],
)
def test_a_stranger_is_refused_by_name_with_the_likely_causes(
    member: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, cause: str
) -> None:
    if folder:
        monkeypatch.setenv(VARIABLE, str(tmp_path / folder))
    else:
        monkeypatch.delenv(VARIABLE)
    with pytest.raises(EtcdAccessRefused, match=cause) as refused:
        member.alone("a").get("key")
    assert isinstance(refused.value, AccessRefused) and isinstance(refused.value, StoreUnavailable)
    assert member.endpoints[0] in str(refused.value)
    assert cause in state(f"etcd://{member.endpoints[0]}/test").text
    [silent] = free_ports(1, ())
    two = state(f"etcd://{member.endpoints[0]},127.0.0.1:{silent}/test")
    assert "etcd has no quorum: 0 of 2" in two.text and cause in two.text
    monkeypatch.setenv(VARIABLE, str(tmp_path / "keys" / "outside"))
    assert member.can_decide(), "others are served on"


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize("url", ["advertised_client_url", "advertised_peer_url"])
@pytest.mark.parametrize("folder", ["other/stranger", ""])
def test_whoever_does_not_look_who_answers_is_refused_all_the_same(
    member: Members, tmp_path: Path, url: str, folder: str
) -> None:
    place = tmp_path / folder
    shown = (str(place / "host.pem"), str(place / "host.key")) if folder else None
    where = str(getattr(member.members["a"], url))
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{where}/version", verify=False, cert=shown, timeout=5.0)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{where.replace('https', 'http')}/version", timeout=5.0)
    ours = (str(tmp_path / "keys/a/host.pem"), str(tmp_path / "keys/a/host.key"))
    assert requests.get(f"{where}/version", verify=False, cert=ours, timeout=5.0).ok


def test_an_expired_certificate_is_refused_until_it_is_renewed(
    member: Members, authority: Authority
) -> None:
    authority.add_host("outside", days=-1)
    with pytest.raises(EtcdAccessRefused, match=r"refuses this host's certificate .*expired"):
        member.client.get("key")
    authority.add_host("outside")
    member.client.get("key")
    authority.add_host("a", days=-1)
    with pytest.raises(EtcdAccessRefused, match="is not trusted: certificate has expired"):
        member.alone("a").get("key")
    authority.add_host("a")
    member.alone("a").get("key")


def test_a_process_with_keys_is_told_that_etcd_speaks_in_plain(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as plain:
        plain.delenv(VARIABLE)
        members = Members(tmp_path, "a")
        try:
            members.start("a")
            wait_until(members.can_decide, "it to serve")
            monkeypatch.setenv(VARIABLE, str(authority.path / "outside"))
            with pytest.raises(EtcdAccessRefused, match="uses plain HTTP, and this process has"):
                members.alone("a").get("key")
        finally:
            members.end()


def has_value(members: Members) -> bool:
    try:
        return members.client.get("key").value == b"value"
    except StoreError:
        return False


def test_keys_are_renewed_while_members_serve(authority: Authority, tmp_path: Path) -> None:
    """A member reads its certificate at each handshake, and whom it believes when it starts: so
    it is started again where the authorities change, and not where certificates alone do."""
    members = Members(tmp_path, NAMES, authority.path)
    try:
        for name in NAMES:
            members.start(name)
        wait_until(members.can_decide, "a quorum")
        assert members.client.write_unless_changed({"key": 0}, {"key": b"value"}, {})
        old = Keys(authority.path / "outside").certificate.read_bytes()
        for step in ("prepare", "switch", "retire"):
            assert authority.rotate() == step
            wait_until(lambda: has_value(members), "an answer before anything is started again")
            for name in NAMES if step != "switch" else ():
                members.kill(name)
                wait_until(members.can_decide, "the other two to go on")
                members.start(name)
                wait_until(lambda name=name: member_serves(members.members[name]), f"{name} back")
            wait_until(lambda: all(map(members.knows, NAMES)), f"each member's answer, {step}")
        assert old != Keys(authority.path / "outside").certificate.read_bytes()
    finally:
        members.end()


def test_keys_that_do_not_name_the_host_are_refused_with_the_remedy(tmp_path: Path) -> None:
    authority = Authority.begun(tmp_path / "keys")
    authority.add_host("a")
    keys = Keys(tmp_path / "keys" / "a")
    assert certificate_problems(keys) == [], "who runs no member needs none"
    [problem] = certificate_problems(keys, address="10.77.0.1")
    assert "does not name 10.77.0.1" in problem
    assert "mooncake keys add-host FOLDER a=10.77.0.1" in problem
    authority.add_host("a", address="10.77.0.1")
    assert certificate_problems(keys, address="10.77.0.1") == []
    authority.add_host("a", address="a.fleet.example")
    assert certificate_problems(keys, address="a.fleet.example") == []
    assert certificate_problems(keys, address="10.77.0.1")
