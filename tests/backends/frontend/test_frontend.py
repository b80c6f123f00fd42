"""Who is let into a frontend, and what becomes of those inside when it closes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from backends.config_pbtxt import FrontendConfig
from backends.errors import Overloaded, WorkerUnavailable
from backends.frontend.decisions.latest import Decided
from backends.frontend.frontend import Frontend
from backends.frontend.lifecycle.attempts import CALL_SILENCE_S_MAX, Attempts
from backends.frontend.lifecycle.events import FirstText, PrefillReplied, Routed, Understood
from backends.frontend.lifecycle.machine import step
from backends.frontend.live_request import Assignment, LiveRequest
from backends.tenants import ApiKeys
from backends.text.text_stream import OutputDelta
from conductor.config import ConductorConfig
from conductor.messages import Reject, Route, WorkerRef
from tests.backends.asking import TOKENIZER


class Client:
    """Remembers how its request ended."""

    outputs = frozenset[str]()

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.ended = threading.Event()

    def send(self, outputs: Any, is_final: bool = False) -> None:
        if is_final:
            self.ended.set()

    def finish(self) -> None:
        self.ended.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def is_cancelled(self) -> bool:
        return False


class Site:
    """A frontend whose requests stay inside until `is_over`."""

    def __init__(self, keys: ApiKeys | None = None, **config: Any) -> None:
        self.is_over = threading.Event()
        self.stopped: list[tuple[str, str]] = []
        self.cancelled: list[str] = []
        cluster = SimpleNamespace(
            served=self._wait,
            inboxes=lambda worker_id: [],
            grpc_addresses=set,
            finished=lambda *_: None,
            worker_failed=lambda *_: None,
            release=lambda _: None,
            config=ConductorConfig(),
        )
        calls = SimpleNamespace(
            cancel=self.cancelled.append, keep=lambda addresses: None, probe=lambda address: None
        )
        streams = SimpleNamespace(seen_s=lambda request_id: 0.0, forget=lambda request_id: None)
        outbox = SimpleNamespace(
            send=lambda inbox, message: self.stopped.append((inbox, message.request_id))
        )
        config = {"cancel_poll_s": 1.0, **config}
        self.frontend = Frontend(
            FrontendConfig(**config),
            TOKENIZER,
            *cast(Any, (cluster, calls, streams, outbox)),
            keys=keys,
        )

    def _wait(self) -> None:
        assert self.is_over.wait(30.0)
        raise WorkerUnavailable("the test is over")

    def ask(self, tenant: str, **parameters: Any) -> Client:
        client = Client()
        said = {"tenant": tenant} if tenant else {}
        self.frontend.submit({}, {**said, **parameters}, client)
        return client

    def close(self) -> None:
        self.is_over.set()
        self.frontend.close(30.0)


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
    is_waiting = threading.Event()
    site.frontend.cluster.served = is_waiting.set  # type: ignore[method-assign]
    client = site.ask("")
    assert is_waiting.wait(30.0)
    site.frontend.close(timeout_s=0.0)
    assert client.ended.wait(30.0)
    assert str(client.error) == "the frontend is shutting down"


def decoding(site: Site) -> LiveRequest:
    """One request that decode_0 has, or had until nobody heard of it any more."""
    site.ask("")
    [request] = site.frontend.live.all()
    prefill = WorkerRef("prefill_0", "p", "s0", "ipc://p")
    decode = WorkerRef("decode_0", "d", "s0", "ipc://d")
    route = Route("r", prefill, decode, 0, 0, 0, None, cast(Any, None))
    request._assignments[1] = Assignment("r-1", np.zeros(1, np.int32), Decided(route, 0.0), 0.0)
    for event in (
        Understood(Attempts(3, 0.0, 600.0), False, 0.0),
        Routed(1, ("prefill_0", "p"), ("decode_0", "d"), 0.0),
        PrefillReplied(1, FirstText(OutputDelta((), ""), "", 0), 0.0, {}, 0.0),
    ):
        request.state, _ = step(request.state, event)
    return request


def test_a_worker_that_stands_still_is_told_to_stop_what_others_have_taken_over() -> None:
    """The directory has dropped it, so nobody else knows its inbox any more."""
    site = Site(requests_max=4)
    request = decoding(site)
    site.frontend.cluster.on_worker_down("decode_1", "d", 0.0)
    assert not site.stopped
    site.frontend.cluster.on_worker_down("decode_0", "d", 0.0)
    assert sorted(site.stopped) == [("ipc://d", "r-1"), ("ipc://p", "r-1")]
    assert site.cancelled == [f"{request.request_id}-1"]
    site.close()


def test_a_silent_worker_is_told_to_stop_and_its_call_ends_when_it_leaves() -> None:
    """Not before: a call that is cancelled while its worker lives keeps a model from unloading."""
    site = Site(requests_max=4)
    request = decoding(site)
    request.look(2 * CALL_SILENCE_S_MAX, awake_s=2 * CALL_SILENCE_S_MAX)
    assert sorted(site.stopped) == [("ipc://d", "r-1"), ("ipc://p", "r-1")] and not site.cancelled
    site.frontend.cluster.on_worker_down("prefill_0", "p", 0.0)
    assert not site.cancelled
    for _ in range(2):
        site.frontend.cluster.on_worker_down("decode_0", "d", 0.0)
    assert site.cancelled == [f"{request.request_id}-1"]
    site.close()


def test_calls_to_silent_workers_that_never_end_take_no_memory() -> None:
    site = Site(requests_max=4)
    for number in range(9):
        site.frontend._abandon(f"r-{number}", ("decode_0", "d"))
    site.frontend.cluster.on_worker_down("decode_0", "d", 0.0)
    assert site.cancelled == ["r-5", "r-6", "r-7", "r-8"]
    site.close()


LIMITED = '{"tenants": {"default": {"requests_per_minute": 1}}, "keys": []}'


class LimitedSite(Site):
    """Says of the tenant's limits what `used_up` is, and counts what was asked and charged."""

    def __init__(self) -> None:
        super().__init__(ApiKeys(None, LIMITED), requests_max=4)
        self.used_up = ""
        self.asked: list[int | None] = []
        self.charged: list[str] = []
        cluster: Any = self.frontend.cluster
        cluster.arrived, cluster.charged = self._arrived, self.charged.append

    def _arrived(
        self, tenant: str, limits: Any, in_flight: int | None, answers: int
    ) -> Reject | None:
        assert answers == 1
        assert tenant == "default" and limits.requests_per_minute == 1
        self.asked.append(in_flight)
        return Reject("", self.used_up, "used up", None, 7.0) if self.used_up else None


def test_a_tenant_that_used_up_its_limits_is_refused_before_anything_is_read() -> None:
    site = LimitedSite()
    inside = site.ask("")
    site.used_up = "request_rate"
    refused = site.ask("")
    assert kinds([inside, refused]) == ["inside", "request_rate"]
    assert cast(Overloaded, refused.error).retry_after_s == 7.0
    assert site.asked == [0, 1] and len(site.frontend.live) == 1
    site.close()


def test_a_charge_counts_one_request_or_is_refused() -> None:
    site = LimitedSite()
    paid = site.ask("", describe="charge")
    assert paid.ended.wait(30.0) and paid.error is None
    assert site.charged == ["default"] and site.asked == [None]
    site.used_up = "request_rate"
    refused = site.ask("", describe="charge")
    assert refused.ended.wait(30.0) and kinds([refused]) == ["request_rate"]
    assert site.charged == ["default"]
    site.close()


def test_each_of_several_answers_takes_a_place() -> None:
    site = Site(requests_max=4)
    several = {"num_return_sequences": np.array([3], np.int32)}
    first, second = Client(), Client()
    site.frontend.submit(several, {}, first)
    site.frontend.submit(several, {}, second)
    assert kinds([first, second, site.ask(""), site.ask("")]) == [
        "inside",
        "front_full",
        "inside",
        "front_full",
    ]
    site.close()
    assert first.ended.is_set() and isinstance(first.error, WorkerUnavailable)
