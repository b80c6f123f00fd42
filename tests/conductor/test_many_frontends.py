"""Several conductors with the same workers, which tell each other what they routed: soon, late,
twice, out of order or not at all."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from conductor import Conductor, ConductorConfig, Request, Route
from conductor.load.decode_batch import DecodeLoad
from conductor.load.other_frontends import FRONTENDS_MAX, SMALL_TENANTS
from conductor.notes import NOTES_WAITING_MAX, TENANTS_NOTED, NoteBatch, OutgoingNotes
from mooncake_store.records.events import (
    BlockAdded,
    Event,
    Snapshot,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)
from mooncake_store.records.membership import WorkerReport
from tests.conductor.fleet import BLOCK_TOKENS, fleet, keys, node, prompt, report, worker

PREFILLS, DECODES = ("p0", "p1", "p2"), ("d0", "d1", "d2")
FAMILIES = [keys(f"{name}*12") for name in "abcd"]
EMPTY = DecodeLoad(0, 0, 0)
WHOLE = 10_000  # notes in one batch


def made(frontend: str, events: list[Event] | None = None, **config: object) -> Conductor:
    found = Conductor(ConductorConfig(**config), frontend=frontend)  # type: ignore[arg-type]
    found.on_events(fleet(3, 3, 3) if events is None else events, 0.0)
    return found


def acquainted(count: int, **config: object) -> list[Conductor]:
    """Frontends f0, f1, ... that have heard of each other."""
    found = [made(f"f{number}", **config) for number in range(count)]
    pass_on(found, 0.0)
    return found


def pass_on(conductors: list[Conductor], now_s: float) -> None:
    """Everybody's notes to everybody, at once."""
    for batch in [one.take_notes(now_s, WHOLE) for one in conductors]:
        for other in conductors:
            other.on_routed_elsewhere(batch, now_s)


def batches(one: Conductor) -> list[DecodeLoad]:
    return [one._cluster.workers[name, "w1"].batch.load_reserved() for name in DECODES]


def queues(one: Conductor, now_s: float) -> list[tuple[int, float]]:
    """(requests, seconds) at each prefill worker."""
    found = [one._cluster.workers[name, "w1"].queue for name in PREFILLS]
    return [(queue.requests, round(queue.work_s(now_s), 9)) for queue in found]


def total(loads: list[DecodeLoad]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*loads, strict=True)))


def route_of(one: Conductor, request: Request, now_s: float) -> Route:
    found = one.on_request(request, now_s)
    assert isinstance(found, Route), found
    return found


# ---- what notes are good for


def test_two_frontends_that_talk_do_not_pick_the_same_idle_worker() -> None:
    silent = [made("f0"), made("f1")]
    alike = {route_of(one, prompt(f"r{n}", "a*10"), 1.0).prefill for n, one in enumerate(silent)}
    assert len(alike) == 1, "without notes both see three idle workers and take the first"

    first, second = acquainted(2)
    taken = route_of(first, prompt("r0", "a*10"), 1.0)
    pass_on([first, second], 1.02)
    other = route_of(second, prompt("r1", "b*10"), 1.02)
    assert other.prefill != taken.prefill and other.decode != taken.decode
    second.check()


def test_notes_that_come_at_once_make_every_conductor_know_the_same(seed: int) -> None:
    rng = random.Random(seed)
    conductors = acquainted(3, admission="none", shedding="limit", request_s_max=1e9)
    live: dict[str, Conductor] = {}
    decoding: set[str] = set()
    now_s, most = 0.0, 0.0
    for number in range(400):
        now_s += rng.choice((0.0, 0.01, 0.3))
        one = rng.choice(conductors)
        request = prompt(f"r{number}", prompt_tokens=rng.randint(1, 900), output=rng.randint(1, 99))
        if isinstance(one.on_request(request, now_s), Route):
            live[request.request_id] = one
        for name in rng.sample(sorted(live), len(live) // 2):
            if name in decoding:
                live.pop(name).on_finished(name, now_s, rng.choice((None, 3)))
                decoding.discard(name)
            else:
                live[name].on_prefill_finished(name, now_s, 0, rng.choice((None, 0.2)))
                decoding.add(name)
        pass_on(conductors, now_s)
        if rng.random() < 0.3:
            name, running = rng.choice(PREFILLS + DECODES), rng.randint(0, 9)
            said = report(
                name,
                queue_requests=rng.randint(0, 4),
                queue_tokens=rng.randint(0, 2_000),
                running=running,
                pages_used=running * 3,
                context_tokens=running * 99,
                step_s=0.03,
            )
            for each in conductors:
                each.on_events([WorkerReported(said)], now_s)
        first, *others = conductors
        most = max(most, total(batches(first))[0])
        for other in others:
            other.check()
            assert batches(other) == batches(first)
            assert [n for n, _ in queues(other, now_s)] == [n for n, _ in queues(first, now_s)]
            assert [s for _, s in queues(other, now_s)] == pytest.approx(
                [s for _, s in queues(first, now_s)], abs=1e-6
            )
    assert most > 5, "too dull to prove anything"


def test_what_a_report_counted_before_the_note_came_does_not_count_twice() -> None:
    first, second = acquainted(2)
    route = route_of(first, prompt("r0", prompt_tokens=900, output=100), 1.0)
    in_queue = report(route.prefill.worker_id, queue_requests=1, queue_tokens=900, running=1)
    pages = report(route.decode.worker_id, pages_used=16)
    second.on_events([WorkerReported(in_queue), WorkerReported(pages)], 1.3)
    assert sum(n for n, _ in queues(second, 1.3)) == 1, "known as unattributed"
    second.on_routed_elsewhere(first.take_notes(1.31, WHOLE), 1.31)
    assert sum(n for n, _ in queues(second, 1.31)) == 1
    assert total(batches(second)) == (1, 900, 16)

    first.on_prefill_finished("r0", 2.0, 0, 0.9)
    joined = report(route.decode.worker_id, pages_used=16, running=1, context_tokens=900)
    second.on_events([WorkerReported(joined)], 2.5)
    second.on_routed_elsewhere(first.take_notes(2.51, WHOLE), 2.51)
    assert total(batches(second)) == (1, 900, 16)
    assert sum(n for n, _ in queues(second, 2.51)) == 0
    second.check()


@pytest.mark.parametrize("ahead_s", [0.0, 7.5, 1e6])
def test_the_clocks_of_frontends_need_not_agree(ahead_s: float) -> None:
    """A batch says when it was sent, so only how long before that things happened counts."""
    first, second = made("f0"), made("f1")
    second.on_routed_elsewhere(first.take_notes(ahead_s, WHOLE), 0.0)
    first.on_routed_elsewhere(second.take_notes(0.0, WHOLE), ahead_s)
    first.on_events([WorkerReported(report(name)) for name in PREFILLS + DECODES], ahead_s)
    route_of(first, prompt("r0", prompt_tokens=900), ahead_s + 1.0)
    second.on_routed_elsewhere(first.take_notes(ahead_s + 1.02, WHOLE), 1.02)
    assert max(s for _, s in queues(second, 1.02)) == pytest.approx(0.91)
    [work] = [w for n in PREFILLS for w in second._cluster.workers[n, "w1"].queue._ordered]
    assert work.key_s == pytest.approx(1.0 + 2.0 * 0.91, abs=1e-6), "as its own would be"
    first.on_prefill_finished("r0", ahead_s + 1.9, 0, 0.9)
    second.on_routed_elsewhere(first.take_notes(ahead_s + 1.9, WHOLE), 1.95)
    assert total(batches(second))[0] == 1 and max(s for _, s in queues(second, 1.95)) == 0
    second.check()


def test_a_request_that_is_routed_again_under_its_name_is_reserved_once() -> None:
    first, second = acquainted(2)
    failed = route_of(first, prompt("r0", "a*4"), 1.0).prefill
    again = prompt("r0", "a*4", excluded_workers=frozenset({(failed.worker_id, "w1")}))
    route = route_of(first, again, 1.5)
    pass_on([first, second], 1.6)
    assert second.stats().routed_elsewhere == 1
    assert [n for n, _ in queues(second, 1.6)] == [
        int(name == route.prefill.worker_id) for name in PREFILLS
    ]
    first.on_finished("r0", 2.0)
    pass_on([first, second], 2.0)
    assert total(batches(second)) == EMPTY and second.stats().routed_elsewhere == 0


def test_frontends_hear_what_others_are_asked_for() -> None:
    first, second = acquainted(2)
    for number in range(200):
        now_s = 1.0 + 0.1 * number
        for one, asked in ((first, 3), (second, 1)):
            for turn in range(asked):
                name = f"{number}-{turn}"
                one.on_request(prompt(name, prompt_tokens=200), now_s)
                one.on_finished(name, now_s)
        pass_on([first, second], now_s)
    of_second, of_first = first._others.wanted_of[""], second._others.wanted_of[""]
    assert of_first == pytest.approx(3 * of_second, rel=0.05)
    first.on_tick(21.0 + first.config.frontend_silent_s_max)
    assert not first._others.wanted_of, "the other is gone, and all of it is for this one"


def test_beyond_the_largest_tenants_the_others_of_a_frontend_count_as_one() -> None:
    first, _ = acquainted(2)
    wanted = {f"t{number}": 0.1 * (number + 1) for number in range(TENANTS_NOTED + 2)}
    batch = OutgoingNotes("f1").take(1.0, WHOLE, wanted)
    first.on_routed_elsewhere(replace(batch, number=9), 1.0)
    heard = first._others.wanted_of
    assert len(heard) == TENANTS_NOTED + 1 and "t0" not in heard
    assert heard[SMALL_TENANTS] == pytest.approx(0.1 + 0.2)
    assert sum(heard.values()) == pytest.approx(sum(wanted.values()))


# ---- what happens without them


def test_a_missing_batch_gives_up_that_frontend_until_the_reports_come() -> None:
    first, second = acquainted(2)
    route_of(first, prompt("r0", prompt_tokens=900), 1.0)
    route_of(first, prompt("r1", prompt_tokens=900), 1.0)
    pass_on([first, second], 1.02)
    before, waiting = batches(second), queues(second, 1.2)
    first.on_finished("r0", 1.1)
    first.take_notes(1.1, WHOLE)  # nobody gets this one
    route_of(first, prompt("r2", prompt_tokens=500), 1.2)
    second.on_routed_elsewhere(first.take_notes(1.2, WHOLE), 1.2)
    second.check()
    stats = second.stats()
    assert (stats.note_batches_missed, stats.routed_elsewhere) == (1, 1), "r2 is known again"
    assert total(batches(second))[0] == total(before)[0] + 1, "nothing got lighter by not knowing"
    assert sum(s for _, s in queues(second, 1.2)) == pytest.approx(
        sum(s for _, s in waiting) + 0.51
    )
    idle = [WorkerReported(report(name)) for name in PREFILLS + DECODES]
    second.on_events(idle, 1.5)
    assert total(batches(second))[0] == 1 and sum(n for n, _ in queues(second, 1.5)) == 1
    first.on_finished("r1", 1.6)  # given up: its end changes nothing
    first.on_finished("r2", 1.6)
    pass_on([first, second], 1.6)
    second.on_events(idle, 2.1)
    assert total(batches(second)) == EMPTY and sum(n for n, _ in queues(second, 2.1)) == 0


def test_a_frontend_that_died_costs_the_others_nothing_for_long() -> None:
    first, second = acquainted(2)
    for number in range(4):
        route_of(first, prompt(f"r{number}", prompt_tokens=900), 1.0)
    pass_on([first, second], 1.02)
    route_of(second, prompt("own", prompt_tokens=100), 1.1)
    silent_s = second.config.frontend_silent_s_max
    second.on_tick(1.02 + silent_s - 0.01)
    assert second.frontends_known == 1 and second.stats().routed_elsewhere == 4
    second.on_tick(1.02 + silent_s + 0.01)
    assert second.frontends_known == 0 and second.stats().routed_elsewhere == 0
    second.check()
    second.on_events([WorkerReported(report(name)) for name in PREFILLS + DECODES], 5.0)
    assert total(batches(second))[0] == 1, "only its own is left"
    assert second.stats().in_flight == 1
    assert second.notes_waiting == 1, "noted while the other was alive"
    second.on_finished("own", 5.0)
    assert second.notes_waiting == 1 and total(batches(second)) == EMPTY


def test_a_frontend_that_closes_says_so() -> None:
    first, second = acquainted(2)
    route_of(first, prompt("r0", prompt_tokens=900), 1.0)
    pass_on([first, second], 1.02)
    second.on_routed_elsewhere(first.take_notes(1.1, WHOLE, is_last=True), 1.1)
    assert second.frontends_known == 0
    assert [n for n, _ in queues(second, 1.1)] == [1, 0, 0], "it goes on until a report says not"
    second.check()


def test_who_is_alone_notes_nothing_and_its_own_notes_are_not_others() -> None:
    one = made("f0")
    route_of(one, prompt("r0", "a*4"), 1.0)
    one.on_routed_elsewhere(one.take_notes(1.0, WHOLE), 1.0)
    route_of(one, prompt("r1", "a*4"), 1.0)
    assert (one.notes_waiting, one.frontends_known) == (0, 0)


def test_notes_that_nobody_fetches_are_bounded_and_the_gap_shows() -> None:
    first, second = acquainted(2)
    for number in range(NOTES_WAITING_MAX):
        name = f"r{number}"
        first.on_request(prompt(name, "a*2"), 1.0)
        first.on_finished(name, 1.0)
        assert first.notes_waiting <= NOTES_WAITING_MAX
    second.on_routed_elsewhere(first.take_notes(1.1, WHOLE), 1.1)
    assert second.stats().note_batches_missed > 0
    second.check()


def test_the_number_of_known_frontends_is_bounded() -> None:
    one = made("f0")
    for number in range(FRONTENDS_MAX + 5):
        one.on_routed_elsewhere(NoteBatch(f"g{number}", 1, 0.0), 0.001 * number)
    assert one.frontends_known == FRONTENDS_MAX
    one.check()


def test_a_note_about_a_worker_that_is_not_there_reserves_nothing() -> None:
    first, second = acquainted(2)
    route = route_of(first, prompt("r0", "a*4"), 1.0)
    second.on_events([WorkerDown(route.decode.worker_id, "w1")], 1.0)
    pass_on([first, second], 1.02)
    first.on_prefill_finished("r0", 1.5, 0, 0.1)
    first.on_finished("r0", 1.6)
    pass_on([first, second], 1.7)
    second.check()
    assert second.stats().routed_elsewhere == 0


# ---- whatever comes


class ManyFrontends:
    """Frontends that learn of each other in every way, about workers that say anything.

    `loss`, `twice`, `late`: which shares of the batches, for each listener apart, do not come, come
    again later, or come behind others that were sent after them.
    """

    def __init__(self, seed: int, count: int, config: ConductorConfig, *shares: float) -> None:
        self.rng, self.config = random.Random(seed), config
        self.loss, self.twice, self.late = shares
        self.now_s, self.number, self.started = 0.0, 0, 0
        self.conductors: dict[str, Conductor] = {}
        self.under_way: dict[str, list[NoteBatch]] = {}
        self.live: dict[str, str] = {}  # request -> frontend
        for _ in range(count):
            self.start()
        self.most_elsewhere = self.missed = 0
        self.steps = [
            self.request,
            self.request,
            self.request,
            self.retry,
            self.prefilled,
            self.prefilled,
            self.finish,
            self.finish,
            self.report,
            self.report,
            self.send,
            self.send,
            self.send,
            self.deliver,
            self.deliver,
            self.deliver,
            self.tick,
            self.worker,
            self.snapshot,
        ]

    def run(self, steps: int) -> None:
        for number in range(steps):
            self.now_s += self.rng.choice((0.0, 0.001, 0.05, 0.2))
            if number % 250 == 249:
                self.die()
            self.rng.choice(self.steps)()
            for one in self.conductors.values():
                one.check()
                self.most_elsewhere = max(self.most_elsewhere, one.stats().routed_elsewhere)

    def any_name(self) -> str:
        return self.rng.choice(sorted(self.conductors))

    def start(self) -> None:
        name = f"f{self.started}"
        self.started += 1
        self.conductors[name] = Conductor(self.config, frontend=name)
        self.conductors[name].on_events(fleet(3, 3, 3), self.now_s)
        self.under_way[name] = []

    def die(self) -> None:
        """Without a word, with its streams; another one starts."""
        name = self.any_name()
        self.missed += self.conductors[name].stats().note_batches_missed
        del self.conductors[name], self.under_way[name]
        self.live = {request: owner for request, owner in self.live.items() if owner != name}
        self.start()

    def request(self) -> None:
        self.number += 1
        self.ask(f"r{self.number}", self.any_name())

    def ask(
        self, request_id: str, name: str, excluded: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        family = self.rng.choice(FAMILIES)[: self.rng.randint(0, 12)]
        tokens = len(family) * BLOCK_TOKENS + self.rng.randint(1, BLOCK_TOKENS - 1)
        asked = Request(
            request_id,
            tokens,
            family,
            self.rng.choice((0, 5, 500)),
            excluded_workers=excluded,
            tenant=self.rng.choice(("", "t")),
        )
        self.live.pop(request_id, None)
        if isinstance(self.conductors[name].on_request(asked, self.now_s), Route):
            self.live[request_id] = name

    def retry(self) -> None:
        if self.live:
            request_id = self.rng.choice(sorted(self.live))
            name = self.live[request_id]
            self.conductors[name].on_worker_failed("p0", "w1", self.now_s)
            self.ask(request_id, name, frozenset({("p0", "w1")}))

    def prefilled(self) -> None:
        if self.live:
            request_id = self.rng.choice(sorted(self.live))
            seconds = self.rng.choice((None, 0.0, 0.2, 3.0))
            self.conductors[self.live[request_id]].on_prefill_finished(
                request_id, self.now_s, 64, seconds
            )

    def finish(self) -> None:
        if self.live:
            request_id = self.rng.choice(sorted(self.live))
            name = self.live.pop(request_id)
            self.conductors[name].on_finished(request_id, self.now_s, self.rng.choice((None, 7)))

    def hear(self, events: list[Event]) -> None:
        for one in self.conductors.values():
            one.on_events(events, self.now_s)

    def report(self) -> None:
        running = self.rng.randint(0, 9)
        said = report(
            self.rng.choice(PREFILLS + DECODES),
            queue_requests=self.rng.randint(0, 4),
            queue_tokens=self.rng.randint(0, 3_000),
            running=running,
            pages_used=running * 3,
            context_tokens=running * 99,
            step_s=self.rng.choice((0.0, 0.03, 0.5)),
        )
        self.hear([WorkerReported(said)])

    def worker(self) -> None:
        name = self.rng.choice(("p2", "d2"))
        role = "prefill" if name == "p2" else "decode"
        self.hear([WorkerDown(name, "w1"), WorkerUp(worker(name, role, "s2"))])

    def snapshot(self) -> None:
        """A new directory: only one of the listeners has heard of it yet."""
        ups = [event.info for event in fleet(3, 3, 3) if isinstance(event, WorkerUp)]
        nodes = tuple(node(f"s{number}") for number in range(3))
        self.conductors[self.any_name()].on_snapshot(
            Snapshot(2, 0, nodes, tuple(ups), (), ()), self.now_s
        )

    def tick(self) -> None:
        self.conductors[self.any_name()].on_tick(self.now_s)

    def send(self, name: str = "") -> None:
        batch = self.conductors[name or self.any_name()].take_notes(
            self.now_s, self.rng.choice((1, 3, WHOLE))
        )
        for waiting in self.under_way.values():
            if self.rng.random() >= self.loss:
                waiting.append(batch)
                if self.rng.random() < self.twice:
                    waiting.append(batch)
            if len(waiting) > 1 and self.rng.random() < self.late:
                waiting[-2:] = reversed(waiting[-2:])

    def deliver(self, name: str = "") -> None:
        name = name or self.any_name()
        count = self.rng.randint(1, 4)
        for batch in self.under_way[name][:count]:
            self.conductors[name].on_routed_elsewhere(batch, self.now_s)
        del self.under_way[name][:count]

    def end(self, says_it: bool) -> None:
        """All requests end; their frontends say so, or never speak again."""
        for request_id, name in self.live.items():
            self.conductors[name].on_finished(request_id, self.now_s)
        self.live.clear()
        if says_it:
            self.loss = self.late = 0.0
            for name in self.conductors:
                for _ in range(500):
                    if not self.conductors[name].notes_waiting:
                        break
                    self.send(name)
                self.send(name)
        else:
            self.under_way = {name: [] for name in self.conductors}
            self.now_s += self.config.frontend_silent_s_max + 0.01
        for name, one in self.conductors.items():
            while self.under_way[name]:
                self.deliver(name)
            if not says_it:
                one.on_tick(self.now_s)
            one.check()
            self.missed += one.stats().note_batches_missed

    def assert_nothing_is_reserved(self) -> None:
        for one in self.conductors.values():
            stats = one.stats()
            assert (stats.in_flight, stats.routed_elsewhere) == (0, 0)
            assert not one._cluster.in_flight and not one._cluster._sends
            for state in one._cluster.workers.values():
                assert len(state.queue) == len(state.batch) == 0
                assert state.batch._tallies["coming"].pages == 0

    def assert_idle_reports_leave_nothing(self) -> None:
        self.now_s += 1.0
        self.hear([WorkerReported(report(name)) for name in PREFILLS + DECODES])
        for one in self.conductors.values():
            one.check()
            assert batches(one) == [EMPTY] * len(DECODES)
            assert queues(one, self.now_s) == [(0, 0.0)] * len(PREFILLS)


SHARES = {"all": (0.0, 0.0, 0.0), "some": (0.1, 0.2, 0.2), "few": (0.6, 0.3, 0.3)}
ADMISSIONS = ("reserved", "predictive_lengths")
# Half of the combinations have each pair of values; the other half is `long`.
MARKS = (pytest.mark.long, pytest.mark.slow)


@pytest.mark.parametrize(
    ("shares", "admission", "says_it"),
    [
        pytest.param(*case, marks=MARKS[number in (0, 3, 5, 6, 8, 11)])
        for number, case in enumerate(itertools.product(SHARES, ADMISSIONS, [True, False]))
    ],
)
def test_when_everything_is_over_nothing_is_reserved_anywhere(
    seed: int, shares: str, admission: str, says_it: bool
) -> None:
    config = ConductorConfig(
        admission=admission,
        policy="adaptive",
        report_s_max=1e9,
        ttft_slo_s=1e6,
        tbt_slo_s=1e3,
        frontend_silent_s_max=60.0,
    )
    world = ManyFrontends(seed, 3, config, *SHARES[shares])
    world.run(400)
    assert world.most_elsewhere > 1, "too dull to prove anything"
    world.end(says_it)
    # A frontend that died in the middle of it is given up when it was silent for long enough.
    world.now_s += config.frontend_silent_s_max + 0.01
    for one in world.conductors.values():
        one.on_tick(world.now_s)
    world.assert_nothing_is_reserved()
    world.assert_idle_reports_leave_nothing()
    assert (world.missed > 0) == (SHARES[shares][0] > 0), world.missed


def test_a_conductor_hears_the_same_and_decides_the_same(seed: int) -> None:
    """Notes are inputs like all others: no clock, no chance."""
    first, second = (ManyFrontends(seed, 3, ConductorConfig(), 0.1, 0.1, 0.1) for _ in range(2))
    first.run(300)
    second.run(300)
    for name, one in first.conductors.items():
        assert batches(one) == batches(second.conductors[name])
        assert one.stats() == second.conductors[name].stats()


def test_a_report_is_heard_the_same_whoever_routed() -> None:
    """One conductor with all requests, and two that share them: the same after the same reports."""
    alone, (first, second) = made("f0"), acquainted(2)
    said: list[WorkerReport] = []
    for number in range(12):
        request = prompt(f"r{number}", prompt_tokens=300 + number, output=50)
        now_s = 1.0 + 0.01 * number
        route = route_of(alone, request, now_s)
        assert route_of((first, second)[number % 2], request, now_s) == replace(route)
        pass_on([first, second], now_s)
    said = [report(name, queue_requests=2, queue_tokens=400, running=1) for name in PREFILLS]
    said += [report(name, running=3, context_tokens=900, pages_used=40) for name in DECODES]
    for one in (alone, first, second):
        one.on_events([WorkerReported(each) for each in said], 2.0)
        one.check()
        assert batches(one) == batches(alone)
        assert queues(one, 2.1) == queues(alone, 2.1)


def test_frontends_that_see_the_same_hits_copy_a_hot_prefix_once() -> None:
    fronts = acquainted(4, hot_hits_per_s=0.01, hot_half_life_s=100.0)
    firsts = set()
    for family in FAMILIES:
        for one in fronts:
            one.on_events([BlockAdded(key, "s0") for key in family], 1.0)
        for number in range(40):
            for name, one in enumerate(fronts):
                route_of(one, Request(f"{family[0]!r}{number}-{name}", 800, family, 1), 1.0)
                one.on_finished(f"{family[0]!r}{number}-{name}", 1.0)
        suggested = [{made.block_keys[0] for made in one.on_tick(1.0)} for one in fronts]
        those = [name for name, found in enumerate(suggested) if family[0] in found]
        assert len(those) == 1, suggested
        firsts |= set(those)
    assert len(firsts) > 1, "it is not always the same one"
