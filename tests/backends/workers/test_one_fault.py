"""One thing goes wrong at one moment, and at every moment once: neighbours get their answers, and
nobody is left with a page, a lease or a block that is not what its key says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from backends.errors import WorkerUnavailable
from tests.backends.stepped_site import Client, Site, answer_of

SHARED = [2, 7, 1, 8, 2, 8, 1, 8, 2]  # two whole blocks that both prompts begin with
PROMPTS = ([*SHARED, 4, 5], [*SHARED, 9])
TOKENS = 6


class Scene:
    """Two requests with one prefix, and threads that take turns in a fixed order."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.clients = [site.ask(list(prompt), TOKENS) for prompt in PROMPTS]

    @property
    def is_over(self) -> bool:
        return all(client.is_over for client in self.clients)

    def move(self, number: int) -> None:
        """One thread does one thing."""
        site = self.site
        if number % 3 == 0:
            site.turn(site.prefill)
        elif number % 3 == 1:
            site.turn(site.decode)
        elif todo := site.things_to_do():
            todo[number % len(todo)]()

    def finish(self) -> None:
        self.site.settle()
        self.site.check_empty()
        assert self.site.store.wrong == []
        for client in self.clients:
            right = answer_of(client.prompt, TOKENS)
            assert client.answer == right[: len(client.answer)]
            assert client.error is not None or client.answer == right or client.was_stopped  # type: ignore[attr-defined]


@pytest.fixture
def make_scene(seed: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Scene]:
    def made() -> Scene:
        site = Site(seed, monkeypatch)
        site.store.meanwhile = lambda: None
        for worker in site.workers:
            monkeypatch.setattr(worker.driver.engine, "_meanwhile", lambda: None)
        scene = Scene(site)
        for client in scene.clients:
            client.was_stopped = False  # type: ignore[attr-defined]
        return scene

    return made


def moments(make_scene: Callable[[], Scene]) -> int:
    """How many moves two requests take when nothing goes wrong."""
    scene, number = make_scene(), 0
    while not scene.is_over:
        scene.move(number)
        number += 1
        assert number < 2_000
    scene.finish()
    assert all(client.error is None for client in scene.clients)
    return number


def at_every_moment(
    make_scene: Callable[[], Scene], fault: Callable[[Scene], Callable[[], None]]
) -> list[Client]:
    """The other request's client of each run; `fault` begins one and returns what ends it."""
    neighbours = []
    for moment in range(moments(make_scene)):
        scene = make_scene()
        for number in range(moment):
            scene.move(number)
        end = fault(scene)
        for number in range(moment, moment + 3):  # each thread once
            scene.move(number)
        end()
        scene.finish()
        neighbours.append(scene.clients[1])
    return neighbours


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_request_is_stopped(make_scene: Callable[[], Scene], stopped: int) -> None:
    """Also the one that brings the blocks on which the other is blocked."""

    def stop(scene: Scene) -> Callable[[], None]:
        client = scene.clients[stopped]
        client.was_stopped = True  # type: ignore[attr-defined]
        for worker in scene.site.workers:
            worker.stop(client.request_id)
        return lambda: None

    for neighbour in at_every_moment(make_scene, stop):
        if stopped == 0:
            assert neighbour.error is None
            assert neighbour.answer == answer_of(neighbour.prompt, TOKENS)


@pytest.mark.slow
def test_the_directory_does_not_answer_for_a_moment(make_scene: Callable[[], Scene]) -> None:
    def silence(scene: Scene) -> Callable[[], None]:
        scene.site.store.fault_share = 1.0

        def end() -> None:
            scene.site.store.fault_share = 0.0

        return end

    at_every_moment(make_scene, silence)


@pytest.mark.slow
@pytest.mark.parametrize("role", [0, 1])
def test_a_step_fails(make_scene: Callable[[], Scene], role: int) -> None:
    def fail(scene: Scene) -> Callable[[], None]:
        engine: Any = scene.site.workers[role].driver.engine
        engine.fault_share = 1.0

        def end() -> None:
            engine.fault_share = 0.0

        return end

    at_every_moment(make_scene, fail)


@pytest.mark.slow
def test_reads_miss_their_deadline_and_arrive_later(make_scene: Callable[[], Scene]) -> None:
    def late(scene: Scene) -> Callable[[], None]:
        scene.site.store.late_share = 1.0

        def end() -> None:
            scene.site.store.late_share = 0.0

        return end

    at_every_moment(make_scene, late)


@pytest.mark.parametrize("role", [0, 1])
def test_who_was_in_a_step_that_failed_fails_with_it(
    make_scene: Callable[[], Scene], role: int
) -> None:
    scene, number = make_scene(), 0
    worker = scene.site.workers[role]
    while not worker.batching.next_step():
        scene.move(number)
        number += 1
    in_step = {getattr(each, "request_id", each) for each in worker.batching.next_step()}
    worker.driver.engine.fault_share = 1.0
    scene.site.turn(worker)
    worker.driver.engine.fault_share = 0.0
    scene.finish()
    failed = {client.request_id for client in scene.clients if client.error is not None}
    assert failed == in_step
    assert all("the engine failed" in str(c.error) for c in scene.clients if c.error is not None)


def test_kv_that_could_not_be_written_fails_its_prompt_and_no_reply_names_its_blocks(
    make_scene: Callable[[], Scene],
) -> None:
    scene = make_scene()
    prefill, store = scene.site.prefill, scene.site.store
    while prefill.writer.is_idle or not prefill.batching.next_step():  # type: ignore[attr-defined]
        scene.site.turn(prefill)
        while prefill._loading.waiting:  # type: ignore[attr-defined]
            prefill._loading.step()  # type: ignore[attr-defined]
    while not prefill.jobs["r0"].computed_at_s:
        scene.site.turn(prefill)
    store.fault_share = 1.0  # while the writer has everything of the first prompt before it
    while not prefill.writer.is_idle:  # type: ignore[attr-defined]
        prefill.writer.step()  # type: ignore[attr-defined]
    store.fault_share = 0.0
    assert not scene.clients[0].answer, "it was answered all the same"
    scene.finish()
    assert isinstance(scene.clients[0].error, WorkerUnavailable)
