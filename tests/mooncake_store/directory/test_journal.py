"""The journal against a real etcd that loses requests, answers, and carries some out much later.

Not here: what the log says (core/test_durable_log.py), directories as processes
(test_elected_directory.py).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.durable_log import DurableLog, LogChange, PinRecord
from mooncake_store.directory.durable_verbs import restore
from mooncake_store.directory.etcd import (
    EtcdClient,
    EtcdExhausted,
    EtcdFailed,
    EtcdRefused,
    _packed,
)
from mooncake_store.directory.journal import LeadLost, SavedState, StateJournal
from mooncake_store.errors import StateNotSaved
from tests.mooncake_store.etcd_process import EtcdProcess

Quotas = dict[str, int]


class LossyEtcd(EtcdClient):
    """Loses what `chance` says: the request, the answer, or the request until `deliver`."""

    def __init__(self, url: str, chance: random.Random, loss: float = 0.0) -> None:
        super().__init__([url], timeout_s=5.0)
        self.chance, self.loss = chance, loss
        self.late: list[tuple[str, Any]] = []

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        how = self.chance.random()
        if how < self.loss / 3:
            raise EtcdFailed("the request is lost")
        if how < 2 * self.loss / 3:
            self.late.append((path, body))
            raise EtcdFailed("the request is late")
        answer = super()._post(path, body)
        if how < self.loss:
            raise EtcdFailed("the answer is lost")
        return answer

    def deliver(self) -> None:
        """What was late arrives now."""
        late, self.late = self.late, []
        for path, body in late:
            super()._post(path, body)


class FullEtcd(EtcdClient):
    """Says of each write that there is no room for it, which it may have made all the same."""

    is_made = True

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        is_write = path.endswith("/txn")
        answer = super()._post(path, body) if self.is_made or not is_write else None
        if is_write:
            raise EtcdExhausted("mvcc: database space exceeded")
        return answer


class AnsweringOnce(BaseHTTPRequestHandler):
    """Of an endpoint that answers everything with one status and body."""

    status, body = 200, b""

    def do_POST(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


class Reigns:
    """One leader after another at one prefix."""

    def __init__(self, etcd: EtcdProcess) -> None:
        self.prefix, self.epoch = etcd.fresh_prefix(), 0
        self._etcd = EtcdClient([etcd.url], timeout_s=5.0)

    def begin(
        self, etcd: EtcdClient, may_serve: Callable[[], bool] = lambda: True
    ) -> tuple[StateJournal, SavedState]:
        self.epoch += 1
        lead = {f"{self.prefix}/leader": str(self.epoch).encode()}
        revision = self._etcd.write_unless_changed({}, lead, {})
        assert revision
        journal = StateJournal(etcd, self.prefix, self.epoch, revision, may_serve)
        return journal, journal.begin()


def quotas_of(log: DurableLog, chance: random.Random) -> LogChange:
    return log.set_quota(chance.choice("abc/ü"), chance.choice([0, 5, 7]))


def test_what_was_answered_is_there_and_what_was_refused_is_not_whatever_etcd_loses(
    etcd: EtcdProcess, seed: int
) -> None:
    chance, reigns = random.Random(seed), Reigns(etcd)
    lossy = LossyEtcd(etcd.url, chance)
    quotas: Quotas = {}
    outcomes = {"written": 0, "refused": 0, "lost": 0}
    for _ in range(12):
        lossy.loss = 0.0
        journal, saved = reigns.begin(lossy)
        assert saved.quotas == quotas
        lossy.deliver()  # of the leader before: it must change nothing now
        log = DurableLog()
        log.outnumber(saved.number)
        lossy.loss = chance.choice([0.0, 0.3, 0.6])
        for _ in range(12):
            change = quotas_of(log, chance)
            try:
                journal.write(change)
            except StateNotSaved:
                outcomes["refused"] += 1
            else:
                outcomes["written"] += 1
                quotas.pop(change.tenant, None)
                if change.quota_bytes:
                    quotas[change.tenant] = change.quota_bytes
            if chance.random() < 0.3:
                loss, lossy.loss = lossy.loss, 0.0
                lossy.deliver()  # of this leader: what it refused must not come true
                lossy.loss = loss
    assert outcomes["written"] > 30 and outcomes["refused"] > 5, outcomes
    assert reigns.begin(EtcdClient([etcd.url]))[1].quotas == quotas


def test_a_leader_that_was_replaced_writes_nothing_and_does_not_wait_for_ever(
    etcd: EtcdProcess,
) -> None:
    reigns, client = Reigns(etcd), EtcdClient([etcd.url], timeout_s=5.0)
    believes = [True, True, True, False]
    first, _ = reigns.begin(client, lambda: believes.pop(0))
    second, _ = reigns.begin(client)
    log = DurableLog()
    second.write(log.set_quota("t", 7))
    with pytest.raises(LeadLost):
        first.write(log.set_quota("t", 1))
    assert reigns.begin(client)[1].quotas == {"t": 7}


def test_a_lead_that_went_without_a_successor_cannot_be_used_any_more(etcd: EtcdProcess) -> None:
    reigns, client = Reigns(etcd), EtcdClient([etcd.url], timeout_s=5.0)
    believes = [True] * 3 + [False]
    journal, _ = reigns.begin(client, lambda: believes.pop(0))
    client.write_unless_changed(
        {}, {}, {}, [(f"{reigns.prefix}/leader", f"{reigns.prefix}/leadex")]
    )
    with pytest.raises(LeadLost):
        journal.write(DurableLog().set_quota("t", 1))
    assert reigns.begin(client)[1].quotas == {}


def test_more_than_etcd_takes_at_once_is_refused_and_changes_nothing(etcd: EtcdProcess) -> None:
    reigns, client = Reigns(etcd), EtcdClient([etcd.url], timeout_s=5.0)
    journal, _ = reigns.begin(client)
    log = DurableLog()
    with pytest.raises(StateNotSaved, match=r"too large|larger than max"):
        journal.write(LogChange(1, PinRecord("hard", (), bytes(16 * 200_000))))
    largest = log.pin([number.to_bytes(16, "big") for number in range(65_536)], "hard", 0)
    journal.write(largest)
    assert largest.pins is not None
    assert reigns.begin(client)[1].pins == [(largest.number, largest.pins)]


GRPC = {  # of its codes, with the status that the gateway makes of them (several, by release)
    (3, 400): EtcdRefused,
    (5, 404): EtcdRefused,
    (7, 403): EtcdRefused,
    (9, 412): EtcdRefused,
    (11, 400): EtcdRefused,
    (16, 401): EtcdRefused,
    (8, 429): EtcdExhausted,
    (1, 408): EtcdFailed,
    (1, 499): EtcdFailed,
    (2, 500): EtcdFailed,
    (4, 504): EtcdFailed,
    (10, 409): EtcdFailed,
    (13, 500): EtcdFailed,
    (14, 503): EtcdFailed,
}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        *((status, b'{"code":%d}' % code, kind) for (code, status), kind in GRPC.items()),
        *((status, b"<html>of a proxy</html>", EtcdFailed) for status in (400, 404, 408, 429)),
        *((400, body, EtcdFailed) for body in (b"", b"[]", b"null", b'{"code":"3"}', b"\xff")),
    ],
)
def test_only_what_etcd_itself_refused_is_known_not_to_be_carried_out(
    status: int, body: bytes, kind: type[EtcdFailed]
) -> None:
    answer = type("Answer", (AnsweringOnce,), {"status": status, "body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        for endpoints, expected in (
            ([here], kind),
            ([here, here], kind),
            ([here, "http://127.0.0.1:1"], EtcdFailed),
        ):
            with pytest.raises(EtcdFailed, match="does not carry out /v3/kv/range") as caught:
                EtcdClient(endpoints).get("key")
            assert type(caught.value) is expected
        server.shutdown()


def test_what_a_full_etcd_refuses_may_be_written_and_that_is_found_out(etcd: EtcdProcess) -> None:
    reigns, client, log = Reigns(etcd), EtcdClient([etcd.url], timeout_s=5.0), DurableLog()
    journal, _ = reigns.begin(client)
    journal._etcd = full = FullEtcd([etcd.url], timeout_s=5.0)
    change = log.set_quota("written", 5)
    journal.write(change)
    log.written(change)
    full.is_made = False
    with pytest.raises(StateNotSaved, match="database space exceeded"):
        journal.write(log.set_quota("refused", 6))
    journal._etcd = client
    journal.write(log.set_quota("later", 7))
    assert reigns.begin(client)[1].quotas == {"written": 5, "later": 7}


def test_a_rewritten_log_replaces_the_records_before_it_in_one_piece(etcd: EtcdProcess) -> None:
    reigns, client = Reigns(etcd), EtcdClient([etcd.url], timeout_s=5.0)
    journal, _ = reigns.begin(client)
    log = DurableLog()
    for number in range(20):
        change = log.pin([number.to_bytes(16, "big")], "soft", until_ms=number)
        journal.write(change)
        log.written(change)
    soft = [(number.to_bytes(16, "big"), number) for number in range(20)]
    for part in log.rewritten({"hard": [], "soft": soft}):
        journal.write(part)
        log.written(part)
    ((number, record),) = reigns.begin(client)[1].pins
    assert (record.until_ms, record.entries, number) == (tuple(range(20)), 20, 21)


def test_garbage_in_etcd_costs_what_it_stands_for_and_never_the_directory(
    etcd: EtcdProcess, seed: int
) -> None:
    chance, reigns = random.Random(seed), Reigns(etcd)
    client = EtcdClient([etcd.url], timeout_s=5.0)
    journal, _ = reigns.begin(client)
    log = DurableLog()
    good = log.pin([bytes(16)], "hard", 0)
    journal.write(good)
    journal.write(log.set_quota("acme", 7))
    sound = PinRecord("soft", (5,), bytes(32))
    damaged = [
        msgspec.msgpack.encode(record)
        for record in (
            PinRecord("pink", (), bytes(16)),
            PinRecord("hard", (), bytes(17)),
            PinRecord("soft", (), bytes(16)),
            PinRecord("soft", (1, 2, 3), bytes(32)),
            PinRecord("hard", (1,), bytes(16)),
            PinRecord("hard", (), b""),
        )
    ] + [msgspec.msgpack.encode(sound)[:-1], b"", b"\xff" * 9, chance.randbytes(200)]
    state = f"{reigns.prefix}/state"
    for number, value in enumerate(damaged, start=50):
        client.write_unless_changed({}, {f"{state}/pins/{number:016x}": value}, {})
    client.write_unless_changed({}, {f"{state}/pins/": msgspec.msgpack.encode(sound)}, {})
    client.write_unless_changed({}, {f"{state}/pins/{'f' * 16}": msgspec.msgpack.encode(sound)}, {})
    for tenant, value in (("a", b"-1"), ("b", b"9" * 5_000), ("c", b"\xb2"), ("d", b"")):
        client.write_unless_changed({}, {f"{state}/quota/{tenant}": value}, {})
    client._post(
        "/v3/kv/put",
        {"key": _packed(f"{state}/quota/".encode() + b"\xff\xfe"), "value": _packed(b"x")},
    )
    for head in (b"", b"{}", b'{"epoch":1,"number":-9}', b"[" * 10_000, chance.randbytes(50)):
        client.write_unless_changed({}, {f"{state}/head": head}, {})
        later, saved = reigns.begin(client)
        directory = Directory(9)
        restore(directory, saved, now_s=0.0)
        directory.check()
        assert (len(directory.pins), saved.quotas) == (1, {"acme": 7})
        later.write(log.set_quota("acme", 7))


def test_a_damaged_record_costs_its_own_pins_only(
    etcd: EtcdProcess, caplog: pytest.LogCaptureFixture
) -> None:
    reigns, client = Reigns(etcd), EtcdClient([etcd.url], timeout_s=5.0)
    journal, _ = reigns.begin(client)
    log = DurableLog()
    changes = [log.pin([bytes([number]) * 16], "hard", 0) for number in range(3)]
    for change in changes:
        journal.write(change)
    broken = f"{reigns.prefix}/state/pins/{changes[1].number:016x}"
    client.write_unless_changed({}, {broken: b"\xff\x00nonsense"}, {})
    found = reigns.begin(client)[1].pins
    assert [number for number, _ in found] == [changes[0].number, changes[2].number]
    assert f"{broken} in etcd is damaged" in caplog.text
