"""Who is let into a frontend, and what becomes of those inside when it closes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backends.errors import Overloaded, WorkerUnavailable
from backends.frontend.frontend import FrontDoor, Running
from backends.frontend.live_requests import LiveRequest
from backends.frontend.request_times import RequestTimes
from backends.metrics.page import Observations
from backends.workers.config import FrontConfig
from backends.workers.protocol import Stop
from conductor.messages import WorkerRef
from tests.backends.asking import TOKENIZER


class Client:
    """Remembers how its request ended."""

    outputs = frozenset[str]()

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.ended = threading.Event()

    def send(self, outputs: Any, is_final: bool = False) -> None: ...

    def finish(self) -> None:
        self.ended.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def is_cancelled(self) -> bool:
        return False


class Site:
    """A frontend whose requests stay inside until `is_over`."""

    def __init__(self, **config: Any) -> None:
        self.is_over = threading.Event()
        self.door = FrontDoor(
            FrontConfig(cancel_poll_s=0.01, **config), TOKENIZER,
            cast(Any, SimpleNamespace(
                served=self._wait, inboxes=lambda worker_id: [], grpc_addresses=set
            )),
            *cast(Any, [None] * 3),
        )  # fmt: skip

    def _wait(self) -> None:
        assert self.is_over.wait(30.0)
        raise WorkerUnavailable("the test is over")

    def ask(self, tenant: str) -> Client:
        client = Client()
        self.door.submit({}, {"tenant": tenant} if tenant else {}, client)
        return client

    def close(self) -> None:
        self.is_over.set()
        self.door.close(30.0)


def kinds(clients: list[Client]) -> list[str]:
    found = []
    for client in clients:
        assert client.error is None or isinstance(client.error, Overloaded)
        found.append(client.error.kind if client.error else "inside")
    return found


@pytest.mark.parametrize("flood", ["", "a"])
def test_a_flood_of_one_tenant_leaves_places_to_another(flood: str) -> None:
    site = Site(requests_max=4, tenant_requests_share=0.5)
    first = site.ask("b")
    flooding = [site.ask(flood) for _ in range(4)]
    second = site.ask("b")
    assert kinds([first, second]) == ["inside", "inside"]
    assert kinds(flooding) == ["inside", "inside", "tenant_full", "tenant_full"]
    assert kinds([site.ask("b")]) == ["front_full"]
    site.close()
    assert all(client.ended.is_set() for client in (first, second, *flooding))


def test_a_tenant_alone_may_have_all_places() -> None:
    site = Site(requests_max=4, tenant_requests_share=0.5)
    assert kinds([site.ask("a") for _ in range(5)]) == [*["inside"] * 4, "front_full"]
    site.close()


def test_a_frontend_that_closes_ends_the_requests_that_wait_for_a_worker() -> None:
    site = Site(requests_max=4)
    paused = threading.Event()

    def pause() -> None:
        [live] = site.door.live.all()
        paused.set()
        live.pause(3600.0)

    site.door.cluster.served = pause  # type: ignore[method-assign]
    client = site.ask("")
    assert paused.wait(30.0)
    site.door.close(timeout_s=0.0)
    assert client.ended.wait(30.0)
    assert str(client.error) == "the frontend is shutting down"


def test_a_worker_that_stands_still_is_told_to_stop_what_others_have_taken_over() -> None:
    """The directory has dropped it, so nobody else knows its inbox any more."""
    site, told, cancelled = Site(requests_max=4), [], []
    outbox = SimpleNamespace(send=lambda inbox, message: told.append((inbox, message.request_id)))
    site.door._outbox = cast(Any, outbox)
    site.door._call = cast(Any, SimpleNamespace(cancel=cancelled.append, keep=lambda _: None))
    site.door._drive = lambda live: None  # type: ignore[method-assign]
    site.ask("")
    [live] = site.door.live.all()
    live.worker_request_id = "r-1"
    live.workers = (
        WorkerRef("prefill_0", "p", "s0", "ipc://p"), WorkerRef("decode_0", "d", "s0", "ipc://d")
    )  # fmt: skip
    live.run = cast(Any, SimpleNamespace(
        lost=lambda *worker: worker[:2] == ("decode_0", "d"), fell_silent=lambda now_s: None,
    ))  # fmt: skip
    site.door.cluster.on_worker_down("decode_1", "d", 0.0)
    assert not told
    site.door.cluster.on_worker_down("decode_0", "d", 0.0)
    assert sorted(told) == [("ipc://d", "r-1"), ("ipc://p", "r-1")] and cancelled == ["r-1"]
    site.close()


def test_a_silent_worker_is_told_to_stop_and_its_call_ends_when_it_leaves() -> None:
    """Not before: a call that is cancelled while its worker lives keeps a model from unloading."""
    site = Site(requests_max=4)
    cancelled: list[str] = []
    told: list[tuple[str, Any]] = []
    site.door._call = cast(Any, SimpleNamespace(cancel=cancelled.append, keep=lambda _: None))
    site.door._outbox = cast(Any, SimpleNamespace(send=lambda *sent: told.append(sent)))
    silent: list[tuple[str, str]] = [("decode_0", "d")]
    driven = threading.Event()

    def run(served: object) -> bool:
        driven.set()
        return False

    generation = SimpleNamespace(run=run, lost=lambda *_: False, fell_silent=lambda now_s: None)
    client = Client()
    live = LiveRequest("r", client, RequestTimes(Observations(), 0.0), 0.0)
    live.worker_request_id = "r-1"
    live.workers = (WorkerRef("decode_0", "d", "s0", "ipc://d"),)
    live.run = cast(Any, Running(cast(Any, generation), cast(Any, None), client, cast(Any, None)))
    site.door._look(live, 0.0)
    assert not told
    generation.fell_silent = lambda now_s: silent.pop()
    site.door._look(live, 0.0)
    assert driven.wait(30.0)
    assert told == [("ipc://d", Stop("r-1", "it goes on elsewhere"))] and not cancelled
    site.door._worker_down("prefill_0", "p", 0.0)
    assert not cancelled
    for _ in range(2):
        site.door._worker_down("decode_0", "d", 0.0)
    assert cancelled == ["r-1"]
    site.close()
