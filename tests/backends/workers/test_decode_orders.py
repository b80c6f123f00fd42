"""A hand-over's messages, its request and its stop reach the decode worker in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from backends.errors import Cancelled
from backends.workers.protocol import PrefillReply
from tests.backends.stepped_site import VOCABULARY, Site, answer_of

TAIL = [4, 1, 5, 9]  # of each prompt: a whole block and a partial one, in two layers
TOKENS = 5  # the request fills another block


class HandOver:
    """A prompt that is computed; what prefill has to say of it waits to be delivered."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.reply: tuple[int, PrefillReply] | None = None
        number = len(site.clients)  # no prompt has the prefix of another one
        self.client = site.ask([number % VOCABULARY, number // VOCABULARY, *TAIL], TOKENS)
        self.right = answer_of(self.client.prompt, TOKENS)
        self.prefilled = self.client.prefilled
        self.client.prefilled = self._keep  # type: ignore[method-assign]
        while self.reply is None:
            site.turn(site.prefill)
            while site.prefill._loading.waiting:  # type: ignore[attr-defined]
                site.prefill._loading.step()  # type: ignore[attr-defined]
            while not site.prefill.writer.is_idle:  # type: ignore[attr-defined]
                site.prefill.writer.step()  # type: ignore[attr-defined]
        self.messages = [message for _, message in site.outbox.messages]
        site.outbox.messages.clear()

    def _keep(self, token_id: int, reply: PrefillReply) -> None:
        self.reply = token_id, reply

    def announce(self, number: int) -> None:
        self.site.decode._on_message(self.messages[number])

    def submit(self) -> None:
        assert self.reply is not None
        self.prefilled(*self.reply)

    def stop(self) -> None:
        self.site.decode.stop(self.client.request_id)


def nothing(site: Site) -> None: ...


def one_turn(site: Site) -> None:
    site.turn(site.decode)


def everything_loaded(site: Site) -> None:
    site.turn(site.decode)
    while site.decode._loading.waiting:  # type: ignore[attr-defined]
        site.decode._loading.step()  # type: ignore[attr-defined]


BETWEEN: tuple[Callable[[Site], None], ...] = (nothing, one_turn, everything_loaded)


def play(site: Site, order: Sequence[str], between: Sequence[Callable[[Site], None]]) -> HandOver:
    over = HandOver(site)
    assert len(over.messages) == 2, "one for each layer"
    for name, pause in zip(order, between, strict=True):
        if name in ("submit", "stop"):
            getattr(over, name)()
        else:
            over.announce(int(name))
        pause(site)
    site.settle()
    site.check_empty()
    assert site.store.wrong == []
    return over


@pytest.fixture
def site(seed: int, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(seed, monkeypatch, whole_bytes_max=0)  # each layer has a message of its own
    monkeypatch.setattr(made, "_turn_meanwhile", lambda: None)
    made.store.meanwhile = lambda: None
    monkeypatch.setattr(made.prefill.driver.engine, "_meanwhile", lambda: None)
    monkeypatch.setattr(made.decode.driver.engine, "_meanwhile", lambda: None)
    return made


ORDERS = list(itertools.permutations(("0", "1", "submit")))
STOPPED = list(itertools.permutations(("0", "1", "submit", "stop")))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_request_is_answered_whatever_came_before_it(site: Site, order: tuple[str, ...]) -> None:
    for between in itertools.product(BETWEEN, repeat=len(order)):
        over = play(site, order, between)
        assert over.client.error is None and over.client.answer == over.right, between


@pytest.mark.slow
@pytest.mark.parametrize("order", STOPPED, ids="-".join)
def test_a_request_that_is_stopped_leaves_nothing_whenever_that_is(
    site: Site, order: tuple[str, ...]
) -> None:
    for between in itertools.product(BETWEEN[1:], repeat=len(order)):
        over = play(site, order, between)
        client = over.client
        if order.index("stop") < order.index("submit"):
            assert isinstance(client.error, Cancelled), between
        else:
            assert client.error is None
        assert client.answer == over.right[: len(client.answer)]


def test_what_was_read_ahead_is_not_read_again(site: Site) -> None:
    over = HandOver(site)
    over.announce(0)
    over.announce(1)
    everything_loaded(site)  # pages are given out, and nothing is read before
    over.announce(0)
    over.announce(1)
    everything_loaded(site)
    reads: list[int] = []
    read = site.store.read
    site.store.read = lambda copies, *rest: reads.append(len(copies)) or read(copies, *rest)  # type: ignore
    over.submit()
    everything_loaded(site)
    assert reads == []
    site.settle()
    assert over.client.answer == over.right


def test_pages_of_a_request_that_never_comes_are_given_back_after_its_lease(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = HandOver(site)
    over.announce(0)
    site.turn(site.decode)
    assert site.decode._pages.used_pages
    monkeypatch.setattr(site.decode._arrivals, "_ttl_s", -1.0)
    site.turn(site.decode)
    assert site.decode._pages.used_pages == 0


def test_layers_in_line_before_the_request_s_own_loading_are_read_for_it(site: Site) -> None:
    over = HandOver(site)
    over.announce(0)
    everything_loaded(site)  # pages are given out
    over.announce(0)
    over.announce(1)
    over.submit()
    site.turn(site.decode)  # the request has its pages, and its loading stands behind the layers
    reads: list[int] = []
    read = site.store.read
    site.store.read = lambda copies, *rest: reads.append(len(copies)) or read(copies, *rest)  # type: ignore
    everything_loaded(site)
    assert reads == [2, 2], "two blocks of each layer, and no block as a whole"
    site.settle()
    assert over.client.answer == over.right


def test_what_was_handed_over_is_released_as_soon_as_it_is_loaded(site: Site) -> None:
    over = HandOver(site)
    over.submit()
    assert site.store.leases[over.client.request_id]
    everything_loaded(site)
    assert over.client.request_id not in site.store.leases
    site.settle()
