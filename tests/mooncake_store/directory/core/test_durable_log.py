"""The log of pins and quotas: what a directory finds that reads it whole or cut short."""

from __future__ import annotations

import random

import pytest

from mooncake_store.directory.core import durable_log
from mooncake_store.directory.core.durable_log import DurableLog, LogChange, PinRecord

Pins = dict[bytes, tuple[str, int]]


class WrittenLog:
    """What is written, as etcd would keep it."""

    def __init__(self) -> None:
        self.records: dict[int, PinRecord] = {}
        self.quotas: dict[str, int] = {}

    def apply(self, change: LogChange) -> None:
        if change.drops_older:
            self.records = {n: r for n, r in self.records.items() if n >= change.drops_older}
        if change.pins is not None:
            self.records[change.number] = change.pins
        if change.tenant:
            self.quotas[change.tenant] = change.quota_bytes

    def pins(self) -> Pins:
        found: Pins = {}
        for _, record in sorted(self.records.items()):
            keys = [record.keys[at : at + 16] for at in range(0, len(record.keys), 16)]
            until = record.until_ms * len(keys) if len(record.until_ms) == 1 else record.until_ms
            for at, key in enumerate(keys):
                found.pop(key, None)
                if record.kind != "none":
                    found[key] = record.kind, until[at] if until else 0
        return found


def by_kind(pins: Pins) -> dict[str, list[tuple[bytes, int]]]:
    return {
        kind: [(key, until) for key, (its, until) in pins.items() if its == kind]
        for kind in ("hard", "soft")
    }


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_whatever_is_pinned_and_rewritten_the_log_says_the_same_at_every_cut(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_log, "REWRITTEN_KEYS", 5)
    monkeypatch.setattr(durable_log, "SLACK_ENTRIES", 30)
    monkeypatch.setattr(durable_log, "RECORDS_MAX", 12)
    chance = random.Random(seed)
    log, written, pins, rewritten = DurableLog(), WrittenLog(), Pins(), 0
    for step in range(3_000):
        kind = chance.choice(["hard", "soft", "none"])
        keys = [key(number) for number in chance.sample(range(40), chance.randint(1, 12))]
        change = log.pin(keys, kind, until_ms=step)
        if chance.random() < 0.2:
            continue  # it could not be written
        written.apply(change)
        log.written(change)
        for each in keys:
            pins.pop(each, None)
            if kind != "none":
                pins[each] = kind, step if kind == "soft" else 0
        assert written.pins() == pins
        if log.is_too_long(len(pins)):
            cut = chance.choice([None, None, chance.randint(0, 8)])
            for number, part in enumerate(log.rewritten(by_kind(pins))):
                if number == cut:
                    break  # the leader was killed here, or etcd did not answer
                written.apply(part)
                log.written(part)
                assert written.pins() == pins, "half a rewritten log says something else"
            else:
                rewritten += 1
                assert log.entries == len(pins) and len(log) == len(written.records)
        log.check()
        assert log.entries == sum(record.entries for record in written.records.values())
    assert rewritten > 20


def test_a_log_that_was_found_goes_on_behind_what_it_found() -> None:
    log = DurableLog()
    log.found(3, PinRecord("hard", (), key(1) + key(2)))
    log.found(9, PinRecord("none", (), key(1)))
    log.outnumber(12)  # a quota
    assert (len(log), log.entries) == (2, 3)
    assert log.set_quota("t", 5).number == 13
    change = log.pin([key(5)], "soft", until_ms=7)
    assert change == LogChange(14, PinRecord("soft", (7,), key(5)))
    log.check()


def test_an_empty_log_that_is_rewritten_drops_everything() -> None:
    log = DurableLog()
    log.written(log.pin([key(1)], "hard", 0))
    log.written(log.pin([key(1)], "none", 0))
    (only,) = log.rewritten({"hard": [], "soft": []})
    assert only == LogChange(3, None, drops_older=3)
    log.written(only)
    assert (len(log), log.entries) == (0, 0)


def test_a_million_pins_are_few_records_that_etcd_takes() -> None:
    log = DurableLog()
    every = [key(number) for number in range(1_000_000)]
    for start in range(0, len(every), 65_536):
        log.written(log.pin(every[start : start + 65_536], "hard", 0))
    assert len(log) == 16 and log.entries == 1_000_000
    assert not log.is_too_long(1_000_000) and log.is_too_long(400_000)
    parts = list(log.rewritten({"hard": ((each, 0) for each in every), "soft": []}))
    assert len(parts) == 31 and parts[-1].drops_older == parts[0].number
    assert max(len(part.pins.keys) for part in parts if part.pins) <= 512 * 1024
