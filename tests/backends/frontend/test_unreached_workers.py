"""A worker that cannot be called rests, and comes back when a probe reaches it."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from backends.errors import WorkerDistrusts, WorkerRefused, WorkerUnreached
from backends.frontend import unreached_workers
from backends.frontend.unreached_workers import UnreachedWorkers
from tests.backends.frontend.test_live_request import ANSWER, Case

P, D = ("p0", "w1"), ("d0", "w1")
REFUSED, CUT = WorkerRefused("its certificate has expired"), WorkerUnreached("timed out")


class World:
    """In place of the cluster and of gRPC; `turn` lets every unreached worker be probed once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(unreached_workers, "PROBE_PERIOD_S", 3600.0)
        self.addresses = {P: "a:1", D: "b:1"}
        self.refusals: dict[str, WorkerUnreached] = {}
        self.said: list[tuple[str, bool]] = []
        self.workers = UnreachedWorkers(cast(Any, self), self._probe)

    def grpc_address(self, worker_id: str, incarnation: str) -> str | None:
        return self.addresses.get((worker_id, incarnation))

    def worker_reached(self, worker_id: str, incarnation: str, is_reached: bool) -> None:
        self.said.append((worker_id, is_reached))

    def _probe(self, address: str) -> None:
        if (error := self.refusals.get(address)) is not None:
            raise error

    def turn(self) -> None:
        self.workers._probe_all()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_the_first_call_that_finds_no_way_takes_the_worker_out_until_a_probe_does(
    world: World,
) -> None:
    world.refusals["a:1"] = REFUSED
    world.workers.add(P, REFUSED)
    assert world.said == [("p0", False)]
    assert world.workers.causes() == {"p0": ("refused", "its certificate has expired")}
    world.turn()
    assert set(world.said) == {("p0", False)}, "whoever registers again meanwhile is out, too"
    world.refusals.clear()
    world.turn()
    assert world.said[-1] == ("p0", True) and not world.workers.causes()
    world.workers.close()


def test_a_probe_names_the_newest_cause(world: World) -> None:
    world.refusals["b:1"] = REFUSED
    world.workers.add(D, CUT)
    assert world.workers.causes()["d0"][0] == "cut_off"
    world.turn()
    assert world.workers.causes()["d0"][0] == "refused"
    world.workers.close()


def test_who_knows_another_secret_is_asked_again_when_it_has_begun_anew(world: World) -> None:
    world.workers.add(P, WorkerDistrusts("another secret"))
    world.turn()
    assert world.workers.causes() == {"p0": ("refused", "another secret")}
    del world.addresses[P]
    world.turn()
    assert not world.workers.causes() and ("p0", True) not in world.said
    world.workers.close()


def test_a_process_that_is_gone_is_probed_no_more(world: World) -> None:
    world.workers.add(D, CUT)
    del world.addresses[D]
    world.turn()
    assert not world.workers.causes() and ("d0", True) not in world.said
    world.workers.close()


def test_a_call_that_fails_while_a_probe_gets_through_leaves_nobody_out_for_good(
    world: World,
) -> None:
    """The conductor and the list of those to be probed agree, whatever comes first."""
    has_failed, is_probed, tell = threading.Event(), threading.Event(), world.worker_reached

    def worker_reached(worker_id: str, incarnation: str, is_reached: bool) -> None:
        if not is_reached and is_probed.is_set():  # the second call: the probe may go on now
            has_failed.set()
            threading.Event().wait(0.2)
        tell(worker_id, incarnation, is_reached)

    def probe(address: str) -> None:
        is_probed.set()
        assert has_failed.wait(60.0)

    world.workers.add(P, CUT)
    world.worker_reached, world.workers._probe = worker_reached, probe  # type: ignore[method-assign]
    probing = threading.Thread(target=world.turn)
    probing.start()
    assert is_probed.wait(60.0)
    world.workers.add(P, REFUSED)
    probing.join()
    is_probed_again = "p0" in world.workers.causes()
    assert is_probed_again == (not world.said[-1][1]), world.said
    assert is_probed_again, "the call failed after the probe had begun"
    world.workers.close()


def test_a_worker_that_does_not_answer_keeps_no_other_one_waiting_nor_the_end(world: World) -> None:
    reached, is_over = threading.Event(), threading.Event()

    def probe(address: str) -> None:
        if address == "a:1":
            is_over.wait(60.0)

    def worker_reached(worker_id: str, incarnation: str, is_reached: bool) -> None:
        if is_reached:
            reached.set()

    world.worker_reached, world.workers._probe = worker_reached, probe  # type: ignore[method-assign]
    world.workers.add(P, CUT)
    world.workers.add(D, CUT)
    probing = threading.Thread(target=world.turn)
    probing.start()
    assert reached.wait(60.0) and not is_over.is_set()
    world.workers.close()
    is_over.set()
    probing.join()


def test_a_request_that_meets_refusals_goes_on_elsewhere_and_none_of_them_counts() -> None:
    errors = [REFUSED, CUT] * 3

    def meet(model: str) -> None:
        if model == "decode_0" and errors:
            raise errors.pop()

    case = Case({}, on_call=meet)
    assert case.run() == ANSWER and not errors
    assert case.cluster.failed == [(("decode_0", "d"), error) for error in [CUT, REFUSED] * 3]


def test_probes_are_made_by_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.workers.close()
    monkeypatch.setattr(unreached_workers, "PROBE_PERIOD_S", 0.01)
    reached = threading.Event()
    world.worker_reached = lambda *_, is_reached: is_reached and reached.set()  # type: ignore[method-assign]
    workers = UnreachedWorkers(cast(Any, world), world._probe)
    workers.add(P, CUT)
    assert reached.wait(30.0)
    workers.close()
