"""A broken invariant ends the process with a word; without the switch nothing is checked."""

from __future__ import annotations

import pytest

from mooncake_store.process.self_check import EXIT_STATUS, PERIOD_S, SelfCheck, is_switched_on


def broken() -> None:
    raise AssertionError("7 pages are nobody's")


def test_a_broken_invariant_ends_the_process_and_its_log_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[int] = []
    check = SelfCheck(broken, is_on=True, end=ended.append)
    check.run(0.0)
    assert ended == [EXIT_STATUS]
    assert check.passed == 0
    assert "7 pages are nobody's" in caplog.text


def test_checks_are_counted_and_no_closer_than_the_period() -> None:
    check = SelfCheck(lambda: None, is_on=True)
    for tick in range(20):
        check.run(tick * PERIOD_S / 4)
    assert check.passed == 5


def test_without_the_switch_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_SELF_CHECK", raising=False)
    assert not is_switched_on()
    SelfCheck(broken, is_on=False).run(0.0)
    monkeypatch.setenv("MOONCAKE_SELF_CHECK", "1")
    assert is_switched_on()
