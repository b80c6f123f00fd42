"""Renewed certificates: workers restart one after the other, while the others serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.launcher import renewal
from backends.launcher.renewal import (
    ETCD,
    KEPT_OUT_S,
    SETTLED_S,
    SILENT_S,
    WHOLE_S,
    CertificateRenewal,
    DirectoryTurn,
    HostTurn,
    turn_at,
)
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.directory import Directory
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import Keys
from tests.mooncake_store.directory_thread import DirectoryThread
from tests.mooncake_store.etcd_process import BINARY, HOW_TO, EtcdProcess
from tests.mooncake_store.makers import node_info

WORKERS = ("decode_a_0", "prefill_a_0")


class Turn(HostTurn):
    """Held as the test says."""

    def __init__(self) -> None:
        super().__init__("", "a")
        self.may, self.given_back, self.asked = True, 0, 0
        self.etcd_answers = True

    def is_held(self) -> bool:
        self.asked += 1
        return self.may

    def is_kept_out(self, now_s: float) -> bool:
        return not self.etcd_answers

    def give_back(self) -> None:
        self.given_back += 1


class Host:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority.begun(folder)
        self.authority.add_host("a")
        self.turn = Turn()
        self.renewal = CertificateRenewal(Keys(folder / "a"), self.turn)
        self.is_whole = True
        self.silent: set[str] = set()  # workers that cannot be called
        self.now_s = 100.0
        self.runs = (*WORKERS, ETCD)
        for each in self.runs:
            self.renewal.started(each)

    def due(self, after_s: float) -> str:
        self.now_s += after_s
        return self.renewal.due(
            self.runs, lambda: self.is_whole, lambda each: each not in self.silent, self.now_s
        )

    def renew_out_of_turn(self) -> None:
        """Its keys are renewed and settled, while another host has the turn."""
        self.due(1.0)
        self.authority.rotate()
        self.turn.may = False
        self.due(1.0)
        assert self.due(SETTLED_S) == ""

    def restart_etcd(self) -> None:
        """The first of those that a change of the authorities asks for."""
        assert self.due(SETTLED_S) == "" and self.due(WHOLE_S) == ETCD
        self.renewal.started(ETCD)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "keys")


def test_nothing_is_restarted_while_nothing_changes(host: Host) -> None:
    assert [host.due(10.0) for _ in range(5)] == [""] * 5
    assert host.turn.given_back == 0
    assert CertificateRenewal(None, host.turn).due(WORKERS, lambda: True, lambda _: True) == ""


def test_workers_are_restarted_one_by_one_and_then_the_turn_is_given_back(host: Host) -> None:
    host.due(1.0)
    host.authority.rotate()
    assert host.due(1.0) == "", "a folder that is being copied is waited for"
    host.restart_etcd()
    assert host.due(1.0) == "", "it has only just been started again"
    assert host.due(WHOLE_S) == "decode_a_0"
    host.is_whole = False  # it is being drained
    assert host.due(60.0) == ""
    host.renewal.started("decode_a_0")
    assert host.due(1.0) == ""
    host.is_whole = True
    assert host.due(WHOLE_S / 2) == "", "it has only just become whole"
    assert host.due(WHOLE_S) == "prefill_a_0"
    host.renewal.started("prefill_a_0")
    assert host.turn.given_back == 0
    assert host.due(WHOLE_S) == "" and host.turn.given_back == 1
    assert host.due(WHOLE_S) == "" and host.turn.given_back == 1


def test_a_worker_that_nobody_believes_any_more_is_restarted_at_once_and_alone(host: Host) -> None:
    """Steps of a renewal that come too fast; its host would never be whole again."""
    host.renew_out_of_turn()
    host.silent, host.is_whole = {"prefill_a_0"}, False
    assert host.due(1.0) == "" and host.due(SILENT_S / 2) == "", "it may be late for once"
    host.silent.clear()
    assert host.due(SILENT_S) == ""
    host.silent.add("prefill_a_0")
    assert host.due(1.0) == "" and host.due(SILENT_S) == "prefill_a_0"
    host.renewal.started("prefill_a_0")
    assert host.due(SILENT_S) == "" and host.due(SILENT_S) == "", "it was started with the new ones"


def test_a_host_waits_for_its_turn(host: Host) -> None:
    host.renew_out_of_turn()
    assert [host.due(SETTLED_S) for _ in range(2)] == [""] * 2
    host.turn.may = True
    host.due(0.1)
    assert host.due(WHOLE_S) == ETCD


def test_etcd_is_started_again_only_where_the_authorities_change(host: Host) -> None:
    host.due(1.0)
    host.authority.add_host("a")  # another certificate by the same authority
    host.due(1.0)
    assert host.due(SETTLED_S) == "" and host.due(WHOLE_S) == "decode_a_0"


def test_etcd_that_lets_nobody_in_is_started_again_out_of_turn(host: Host) -> None:
    host.renew_out_of_turn()
    host.turn.etcd_answers = False
    assert host.due(1.0) == ETCD
    host.renewal.started(ETCD)
    assert host.due(1.0) == "", "workers wait for their turn"


def test_a_turn_that_is_not_needed_any_more_is_given_back(host: Host) -> None:
    host.renew_out_of_turn()
    assert host.turn.asked and not host.turn.given_back
    for each in host.runs:  # they ended and were started again by themselves
        host.renewal.started(each)
    host.due(1.0)
    assert host.turn.given_back == 1
    asked = host.turn.asked
    host.due(1.0)
    assert (host.turn.given_back, host.turn.asked) == (1, asked)


def test_a_host_is_kept_out_when_etcd_has_not_answered_for_a_while() -> None:
    turn = HostTurn("etcd://127.0.0.1:1/mooncake/demo/directory", "a")
    assert not turn.is_kept_out(100.0) and not turn.is_kept_out(100.0 + KEPT_OUT_S / 2)
    assert turn.is_kept_out(100.0 + KEPT_OUT_S)


def test_the_same_files_copied_again_restart_nothing(host: Host, tmp_path: Path) -> None:
    host.due(1.0)
    for path in (tmp_path / "keys" / "a").iterdir():
        path.write_bytes(path.read_bytes())
    assert [host.due(SETTLED_S) for _ in range(3)] == [""] * 3


def test_files_that_do_not_belong_together_are_waited_for(host: Host, tmp_path: Path) -> None:
    host.due(1.0)
    host.authority.add_host("b")
    place, other = tmp_path / "keys" / "a", tmp_path / "keys" / "b"
    before = (place / "host.pem").read_bytes()
    (place / "host.pem").write_bytes((other / "host.pem").read_bytes())
    assert [host.due(SETTLED_S) for _ in range(3)] == [""] * 3, "the key is not yet there"
    (place / "host.key").write_bytes((other / "host.key").read_bytes())
    host.due(1.0)
    host.due(SETTLED_S)
    assert host.due(WHOLE_S) == "decode_a_0"
    assert before != (place / "host.pem").read_bytes()


class ServedDirectory:
    """One directory, without an election."""

    def __init__(self, epoch: int = 1) -> None:
        self.thread = DirectoryThread(Directory(epoch))
        self.server = self.thread.server
        self.client = DirectoryClient(self.server.address, timeout_s=30.0)
        for name in ("s1", "s0"):
            self.client.register_node(node_info(name))
        self.turns: list[HostTurn] = []

    def turn(self, host: str) -> HostTurn:
        self.turns.append(turn_at(self.server.address, host))
        return self.turns[-1]

    def writing(self) -> dict[str, int]:
        return {each.node_id: each.writing_blocks for each in self.client.stats().nodes}

    def close(self) -> None:
        for turn in self.turns:
            turn.give_back()
        self.client.close()
        self.thread.close()


@pytest.fixture
def directory() -> Iterator[ServedDirectory]:
    made = ServedDirectory()
    yield made
    made.close()


def asked(turn: HostTurn) -> bool:
    """Now, however lately it was asked."""
    if isinstance(turn, DirectoryTurn):
        turn.asked_s = float("-inf")
    return turn.is_held()


def test_without_an_election_hosts_take_turns_by_the_directory(directory: ServedDirectory) -> None:
    a, b = directory.turn("a"), directory.turn("b")
    assert asked(a) and not asked(b)
    assert asked(a) and not asked(b), "and it stays so"
    assert directory.writing() == {"s0": 1, "s1": 0}
    assert not b.is_kept_out(1e9)
    a.give_back()
    assert directory.writing() == {"s0": 0, "s1": 0}
    assert asked(b) and not asked(a)


def test_two_hosts_never_restart_workers_at_once(
    directory: ServedDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "ASK_AGAIN_S", 0.0)
    authority = Authority.begun(tmp_path / "keys")
    left = dict.fromkeys("ab", 0)  # looks until the worker that is restarted serves again
    renewals, restarted = {}, []
    for name in left:
        authority.add_host(name)
        keys = Keys(tmp_path / "keys" / name)
        renewals[name] = CertificateRenewal(keys, directory.turn(name))
        renewals[name].started(f"decode_{name}_0")
    for look in range(40):
        if look == 1:
            authority.rotate()
        for name, each in renewals.items():
            left[name] = max(0, left[name] - 1)
            if worker := each.due(
                [f"decode_{name}_0"], lambda n=name: not left[n], lambda _: True, 10.0 * look
            ):
                assert not any(left.values()), f"look {look}: {left}"
                each.started(worker)
                restarted.append(worker)
                left[name] = 5
    assert sorted(restarted) == ["decode_a_0", "decode_b_0"]
    assert directory.writing() == {"s0": 0, "s1": 0}, "the turn is given back"


def test_a_turn_passes_by_nodes_that_drain(directory: ServedDirectory) -> None:
    directory.client.drain("s0", True)
    assert asked(directory.turn("a")) and not asked(directory.turn("b"))
    assert directory.writing() == {"s0": 0, "s1": 1}


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_turn_is_one_host_s_when_its_node_begins_to_drain(
    directory: ServedDirectory, first: str
) -> None:
    turns = {name: directory.turn(name) for name in "ab"}
    assert asked(turns["a"]) and not asked(turns["b"])
    directory.client.drain("s0", True)
    second = "ab".replace(first, "")
    assert asked(turns[first]) and not asked(turns[second])
    directory.client.drain("s0", False)
    assert asked(turns[second]) and not asked(turns[first])


def test_the_turn_of_a_host_that_died_ends_with_its_lease(
    directory: ServedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LEASE_S", 0.5)
    dead, next_one = directory.turn("a"), directory.turn("b")
    assert asked(dead)
    wait_until(lambda: asked(next_one))
    assert not asked(dead), "it learns so when it asks"


def test_nobody_has_a_turn_while_the_directory_is_silent(directory: ServedDirectory) -> None:
    turn = directory.turn("a")
    assert asked(turn)
    directory.thread.stop()
    assert not asked(turn)


@pytest.mark.servers
@pytest.mark.skipif(BINARY is None, reason=HOW_TO)
def test_hosts_take_turns_by_an_election(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path)
    address = f"etcd://{etcd.url.removeprefix('http://')}/mooncake/demo/directory"
    turns = {name: turn_at(address, name) for name in ("a", "b")}
    try:
        wait_until(lambda: turns["a"].is_held())
        assert not any(turns["b"].is_held() for _ in range(50))
        turns["a"].give_back()
        wait_until(lambda: turns["b"].is_held())
        assert not turns["a"].is_held()
    finally:
        for turn in turns.values():
            turn.give_back()
        etcd.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)  # poll
