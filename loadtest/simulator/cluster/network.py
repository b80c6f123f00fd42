"""Transfers between nodes whose network cards are shared by all transfers on them.

Each node has one full-duplex link of `bytes_per_s` each way. A transfer is as fast as its sender's
and its receiver's link allow; each link is shared evenly among its transfers. A *paced* transfer
(KV that is sent while it is computed) needs less than its share and gets exactly its pace. Its pace
is subtracted from both links before the other transfers share the remainder.

This is max-min fairness with one exception: bandwidth that a transfer cannot use at its other end
is not given to its neighbours. Not here: who sends what (prefill_node.py, decode_node.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.simulator.cluster.clock import VirtualClock

PACED_SHARE_MAX = 0.5  # share of a link; a faster transfer is not paced and shares as the others do
LEAST_SHARE = 0.1  # share of a link that paced transfers together leave to the others


@dataclass(slots=True, eq=False)
class Link:
    """One direction of one node's network card."""

    paced_bytes_per_s: float = 0.0
    flows: dict[Flow, None] = field(default_factory=dict)  # a set in order


@dataclass(slots=True, eq=False)
class Flow:
    sender: Link
    receiver: Link
    left_bytes: float
    done: Callable[[], None]
    at_s: float = 0.0  # time at which left_bytes was valid
    rate_bytes_per_s: float = 0.0
    plan: int = 0  # grows with each new rate; a scheduled end of an older plan is ignored
    is_over: bool = False


class Network:
    def __init__(self, clock: VirtualClock, bytes_per_s: float, latency_s: float) -> None:
        assert bytes_per_s > 0 and latency_s >= 0, (bytes_per_s, latency_s)
        self._clock = clock
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self._out: dict[str, Link] = {}
        self._in: dict[str, Link] = {}
        self.moved_bytes = 0

    def send(
        self,
        sender: str,
        receiver: str,
        size_bytes: int,
        done: Callable[[], None],
        paced_s: float = 0.0,
    ) -> None:
        """Call `done` when all bytes have arrived. `paced_s`: seconds of computing them."""
        assert size_bytes >= 0 and sender != receiver, (sender, receiver, size_bytes)
        self.moved_bytes += size_bytes
        out, into = self._link(self._out, sender), self._link(self._in, receiver)
        pace = size_bytes / paced_s if paced_s > 0 else self.bytes_per_s
        if pace <= PACED_SHARE_MAX * self.bytes_per_s - max(
            out.paced_bytes_per_s, into.paced_bytes_per_s
        ):
            out.paced_bytes_per_s += pace
            into.paced_bytes_per_s += pace
            self._clock.after(paced_s + self.latency_s, self._paced_done, out, into, pace, done)
            return
        flow = Flow(out, into, size_bytes, done, self._clock.now_s + self.latency_s)
        out.flows[flow] = into.flows[flow] = None
        self._share(out, into)

    def _link(self, links: dict[str, Link], node_id: str) -> Link:
        if node_id not in links:
            links[node_id] = Link()
        return links[node_id]

    def _paced_done(self, out: Link, into: Link, pace: float, done: Callable[[], None]) -> None:
        for link in (out, into):
            link.paced_bytes_per_s = max(0.0, link.paced_bytes_per_s - pace)
        done()

    def _share(self, out: Link, into: Link) -> None:
        """A transfer began or ended on these links: give each of their transfers its new rate."""
        now_s = self._clock.now_s
        for flow in {**out.flows, **into.flows}:
            rate = min(self._share_of(flow.sender), self._share_of(flow.receiver))
            if rate == flow.rate_bytes_per_s:
                continue
            since_s = max(0.0, now_s - flow.at_s)
            flow.left_bytes = max(0.0, flow.left_bytes - since_s * flow.rate_bytes_per_s)
            flow.at_s, flow.rate_bytes_per_s = max(flow.at_s, now_s), rate
            flow.plan += 1
            self._clock.at(flow.at_s + flow.left_bytes / rate, self._ended, flow, flow.plan)

    def _share_of(self, link: Link) -> float:
        room = max(LEAST_SHARE * self.bytes_per_s, self.bytes_per_s - link.paced_bytes_per_s)
        return room / len(link.flows)

    def _ended(self, flow: Flow, plan: int) -> None:
        if plan != flow.plan or flow.is_over:
            return
        flow.is_over = True
        del flow.sender.flows[flow], flow.receiver.flows[flow]
        self._share(flow.sender, flow.receiver)
        flow.done()

    def check(self) -> None:
        """Assert that every transfer has ended and returned its share."""
        for link in (*self._out.values(), *self._in.values()):
            assert not link.flows, f"{len(link.flows)} transfers never ended"
            assert link.paced_bytes_per_s < 1.0, "a paced transfer kept its share"
