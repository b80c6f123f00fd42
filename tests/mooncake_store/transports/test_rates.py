"""How long the probe of rates waits for nodes that keep silent: on a clock of its own.

Not here: rates of real transports (test_store.py), what is said of them (test_known_nodes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports import rates
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.rates import PROBE_S_MAX, Probe
from mooncake_store.transports.transport import ByteSpan, LocalSpan
from tests.mooncake_store.in_process import InProcessDirectory
from tests.mooncake_store.makers import node_info

READ_S = 0.001


class ScriptedTransport:
    """Reads take READ_S; nodes in `answers_at_s` are silent, or refuse, until then."""

    name = "tcp"

    def __init__(self) -> None:
        self.now_s = 100.0
        self.answers_at_s: dict[str, float] = {}
        self.refuses = False

    def read(
        self, node: NodeInfo, remote: list[ByteSpan], local: list[LocalSpan], timeout_s: float
    ) -> None:
        if self.now_s >= self.answers_at_s.get(node.node_id, 0.0):
            self.now_s += READ_S
        elif self.refuses:
            raise TransferFailed("refused")
        else:
            self.now_s += max(timeout_s, 0.0)
            raise TransferTimeout("silent")

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedTransport:
    made = ScriptedTransport()
    clock = SimpleNamespace(
        monotonic=lambda: made.now_s, perf_counter=lambda: made.now_s, sleep=made.sleep
    )
    monkeypatch.setattr(rates, "time", clock)
    return made


@pytest.fixture
def probe(scripted: ScriptedTransport) -> Iterator[Probe]:
    """It knows s0 and s1, and one without an address."""
    directory = InProcessDirectory()
    for node_id in ("s0", "s1"):
        directory.register_node(replace(node_info(node_id), data_address="h:1"))
    directory.register_node(node_info("mute"))
    nodes = KnownNodes(directory, "s0", "tcp")  # type: ignore[arg-type]
    real, nodes.tcp = nodes.tcp, scripted  # type: ignore[assignment]
    yield Probe(nodes)
    nodes.tcp = real
    nodes.close()


def test_a_silent_node_costs_its_share_and_the_others_are_measured(
    probe: Probe, scripted: ScriptedTransport
) -> None:
    scripted.answers_at_s = {"s0": float("inf")}
    started_s = scripted.now_s
    assert set(probe.rates()) == set(probe.latency_s) == {"s1"}
    assert scripted.now_s - started_s == pytest.approx(PROBE_S_MAX, abs=20 * READ_S)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_node_that_is_late_is_probed_again_while_patience_lasts(
    probe: Probe, scripted: ScriptedTransport, refuses: bool
) -> None:
    scripted.answers_at_s, scripted.refuses = {"s1": scripted.now_s + 2.0}, refuses
    assert set(probe.rates(4.0)) == set(probe.latency_s) == {"s0", "s1"}
    scripted.answers_at_s = {"s1": scripted.now_s + 2.0}
    assert set(probe.rates(1.0)) == set(probe.latency_s) == {"s0"}


def test_patience_ends_and_costs_nothing_when_all_answer(
    probe: Probe, scripted: ScriptedTransport
) -> None:
    started_s = scripted.now_s
    assert set(probe.rates(4.0)) == {"s0", "s1"}
    assert scripted.now_s - started_s < 30 * READ_S
    scripted.answers_at_s = {"s0": float("inf"), "s1": float("inf")}
    started_s = scripted.now_s
    assert probe.rates(4.0) == probe.latency_s == {}
    assert 4.0 <= scripted.now_s - started_s <= 4.0 + 2 * PROBE_S_MAX
