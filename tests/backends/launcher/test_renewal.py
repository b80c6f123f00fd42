"""Renewed certificates: workers restart one after the other, while the others serve."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.launcher.renewal import (
    ETCD,
    KEPT_OUT_S,
    SETTLED_S,
    WHOLE_S,
    CertificateRenewal,
    HostTurn,
)
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import Keys
from tests.mooncake_store.etcd_process import BINARY, HOW_TO, EtcdProcess

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
        self.now_s = 100.0
        self.runs = (*WORKERS, ETCD)
        for each in self.runs:
            self.renewal.started(each)

    def due(self, after_s: float) -> str:
        self.now_s += after_s
        return self.renewal.due(self.runs, lambda: self.is_whole, self.now_s)

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
    assert CertificateRenewal(None, host.turn).due(WORKERS, lambda: True) == ""


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


def test_a_host_waits_for_its_turn(host: Host) -> None:
    host.due(1.0)
    host.authority.rotate()
    host.turn.may = False
    host.due(1.0)
    assert [host.due(SETTLED_S) for _ in range(3)] == [""] * 3
    host.turn.may = True
    host.due(0.1)
    assert host.due(WHOLE_S) == ETCD


def test_etcd_is_started_again_only_where_the_authorities_change(host: Host) -> None:
    host.due(1.0)
    host.authority.add_host("a")  # another certificate by the same authority
    host.due(1.0)
    assert host.due(SETTLED_S) == "" and host.due(WHOLE_S) == "decode_a_0"


def test_etcd_that_lets_nobody_in_is_started_again_out_of_turn(host: Host) -> None:
    host.due(1.0)
    host.authority.rotate()
    host.turn.may = False
    host.due(1.0)
    assert host.due(SETTLED_S) == ""
    host.turn.etcd_answers = False
    assert host.due(1.0) == ETCD
    host.renewal.started(ETCD)
    assert host.due(1.0) == "", "workers wait for their turn"


def test_a_turn_that_is_not_needed_any_more_is_given_back(host: Host) -> None:
    host.due(1.0)
    host.authority.rotate()
    host.turn.may = False
    host.due(1.0)
    host.due(SETTLED_S)
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


def test_without_an_election_it_is_always_this_host_s_turn() -> None:
    turn = HostTurn("tcp://127.0.0.1:7001", "a")
    assert turn.is_held()
    turn.give_back()


@pytest.mark.servers
@pytest.mark.skipif(BINARY is None, reason=HOW_TO)
def test_hosts_take_turns_by_an_election(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path)
    address = f"etcd://{etcd.url.removeprefix('http://')}/mooncake/demo/directory"
    turns = {name: HostTurn(address, name) for name in ("a", "b")}
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
