"""A job leaves once, whatever fails meanwhile. Every thread is stepped by hand."""

from __future__ import annotations

from typing import Any

import pytest

from backends.errors import WorkerUnavailable
from backends.workers.lifecycle.events import Do
from backends.workers.lifecycle.states import JobPhase
from tests.backends.stepped_site import Client, Site, answer_of


@pytest.fixture
def site(seed: int, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(seed, monkeypatch)
    site.store.meanwhile = lambda: None
    for worker in site.workers:
        monkeypatch.setattr(worker.driver.engine, "_meanwhile", lambda: None)
    return site


def until_decoding(site: Site, client: Client) -> Any:
    """The request's job at the decode worker, in the batch."""
    for _ in range(1_000):
        job = site.decode.jobs.get(client.request_id)
        if job is not None and job.state.phase is JobPhase.COMPUTING:
            return job
        if todo := site.things_to_do():
            todo[0]()
        else:
            site.turn(site.prefill)
            site.turn(site.decode)
    raise AssertionError("it was never decoded")


def test_a_job_that_leaves_is_not_preempted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader still reads a late layer into its pages, so it stays in the batch for a turn."""
    client = site.ask(list(range(1, 9)), 12)
    job = until_decoding(site, client)
    job.arrival.is_loading = True
    site.decode.stop(client.request_id)
    monkeypatch.setattr(site.decode.batching, "to_preempt", lambda: [client.request_id])
    site.turn(site.decode)
    assert job.state.phase is JobPhase.LEAVING
    monkeypatch.undo()
    job.arrival.is_loading = False
    site.settle()
    assert site.store.wrong == [] and not site.decode.jobs


@pytest.mark.parametrize("action", [Do.JOIN, Do.SEND_FIRST])
def test_an_action_that_raises_fails_its_job_and_no_other(site: Site, action: Do) -> None:
    actions: Any = site.prefill._actions
    carry_out = actions[action]

    def raises_for_the_first(job: Any) -> None:
        if job.request_id == "r0":
            actions[action] = carry_out
            raise RuntimeError("broke")
        carry_out(job)

    actions[action] = raises_for_the_first
    clients = [site.ask([start, *range(3, 10)], 3) for start in (1, 2)]
    site.settle()
    assert isinstance(clients[0].error, WorkerUnavailable)
    assert clients[1].answer == answer_of(clients[1].prompt, 3)
    site.check_empty()


def test_a_worker_that_closes_ends_each_call_once_however_late_its_writer_is(site: Site) -> None:
    worker: Any = site.prefill
    client = site.ask(list(range(1, 9)), 1)
    while worker._loading.has_work:
        worker._loading.step(0)
    worker.stop(client.request_id)
    site.turn(worker)
    assert not client.is_over, "the writer has not written its KV yet"
    worker.close(0)
    assert client.is_over
    while not worker.writer.is_idle:  # the client asserts that it is answered once
        task = worker.writer._tasks.get_nowait()
        if task is not None:
            task()
    assert not worker.open_jobs
