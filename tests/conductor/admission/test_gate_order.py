"""The order of prefill queues while overload is shed, and while it is not."""

from __future__ import annotations

from conductor.admission.admission import Gate
from conductor.admission.limits import ServiceLimits
from conductor.config import ConductorConfig
from conductor.load.cluster import Cluster
from conductor.messages import Prediction, Request
from conductor.queue_order import FIFO, QueueOrder
from conductor.routing.routing import Pair
from tests.conductor.admission.test_fair_share import BUSY, asked

SLO_S = 10.0


def gate(**changes: object) -> Gate:
    config = ConductorConfig(ttft_slo_s=SLO_S, **changes)  # type: ignore[arg-type]
    return Gate(config, ServiceLimits(config, Cluster(config)))


def order_of(made: Gate, request: Request) -> QueueOrder:
    return made.order(request, made.limits(request))


def overload(made: Gate, request: Request, until_s: float = 60.0) -> None:
    """Four times what two workers can do, decided on as a conductor does."""
    pair = Pair(None, None, Prediction(0.0, 0.0, 0.8, 0.0, 0.8, 0.0, 0.0, 0.0))  # type: ignore[arg-type]
    for step in range(int(until_s * 10)):
        is_shed = made.shed(pair, request, BUSY) is not None
        made.note(pair, request, BUSY, step * 0.1, "fair_share" if is_shed else "")


def test_who_is_let_in_under_overload_waits_for_later_ones_no_longer_than_the_held_queue() -> None:
    made, request = gate(backlog_share=0.4), asked(30_000)
    assert order_of(made, request).key_s(0.0, 8.0) == 2 * 8.0
    overload(made, request)
    order = order_of(made, request)
    assert order.key_s(0.0, 8.0) == 0.4 * SLO_S
    assert order.key_s(0.0, 1.0) == 0.4 * SLO_S, "no order among all but the short"
    assert order.key_s(0.0, 0.01) == 0.01 * 20


def test_a_tenant_that_gets_all_it_wants_keeps_the_usual_order() -> None:
    made = gate()
    overload(made, asked(30_000, "greedy"))
    assert order_of(made, asked(30_000, "modest")).key_s(0.0, 8.0) == 2 * 8.0


def test_first_come_first_served_stays_so_under_overload() -> None:
    made, request = gate(queue_order="fifo"), asked(30_000)
    overload(made, request)
    assert order_of(made, request) == FIFO


def test_a_tighter_bound_of_the_operator_holds_under_overload_too() -> None:
    made, request = gate(queue_wait_s_max=1.5), asked(30_000)
    overload(made, request)
    assert order_of(made, request).key_s(0.0, 8.0) == 1.5
