"""Pages go back when no copy touches them any more, and not before, and never on a guess."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from backends.engine.connected.channel import ChannelError
from backends.engine.connected.messages import Stage
from backends.errors import WorkerUnavailable
from backends.workers.connected.driver import StagedPages

STAGE = Stage("r", b"", "", b"", [], [1, 2], 0)


class Host:
    def __init__(self) -> None:
        self.staged: Future[None] = Future()
        self.unstaged: Future[None] = Future()

    def stage(self, stage: Stage, timeout_s: float) -> Future[None]:
        return self.staged

    def unstage(self, request_id: str, timeout_s: float) -> Future[None]:
        return self.unstaged


class Worker:
    def __init__(self) -> None:
        self.host = Host()
        self.words: list[bool] = []  # of pages that were given back: no copy touches them
        self.failures: list[str] = []
        self.deaths: list[str] = []
        self.pages = StagedPages(
            self,  # type: ignore[arg-type]
            1.0,
            self.failures.append,
            self.deaths.append,  # type: ignore[arg-type]
        )


def test_pages_go_back_with_the_connector_s_word() -> None:
    worker = Worker()
    worker.host.staged.set_result(None)
    worker.pages.stage(STAGE)
    worker.pages.give_back("r", [1, 2], worker.words.append)
    assert not worker.words
    worker.host.unstaged.set_result(None)
    assert worker.words == [True] and not worker.failures + worker.deaths


def test_pages_of_a_connector_that_fell_silent_are_lost_and_it_is_told() -> None:
    worker = Worker()
    worker.pages.give_back("r", [1, 2], worker.words.append)
    worker.host.unstaged.set_exception(ChannelError("no answer"))
    assert worker.words == [False] and worker.pages.lost_pages == 2
    assert worker.deaths == ["no answer"]


def test_a_stage_that_is_not_taken_fails_its_request_and_counts_against_the_engine() -> None:
    worker = Worker()
    worker.host.staged.set_exception(ChannelError("no answer"))
    with pytest.raises(WorkerUnavailable, match="no answer"):
        worker.pages.stage(STAGE)
    assert worker.failures == ["no answer"] and not worker.deaths
