"""Transport over NIXL with an agent for each network card: one that is cut costs a moment only.

Nodes of this host are reached by the shared agent, as ever. A transfer with another host is cut
into parts, and each goes over one pair of cards (nic_paths.py says over which, and when it is given
up). One thread posts the parts of a call and looks after all of them.

What may be used again after a part was given up:

* Memory of this process, into which it was read: at once. The lane of the part is frozen
  (nixl_transport.py): its agent has no thread and nobody calls it any more, so nothing is written
  there. The part is read again over another path, into the same memory.
* The slots of a node that it was writing: not at all. The kernel of this host keeps what it could
  not send, and sends it when the card works again, be it minutes later. So nothing is written into
  those slots again: WriteGivenUp says that the call is void, its slots rest in quarantine, and the
  caller writes into fresh ones (putter.py). Bytes that still arrive after the quarantine break the
  checksum of the block that lies there then. A verified read takes that for a miss. A read that
  checks only the header (a part of a block, `is_verified=False`) does not notice such bytes. No
  checksum is computed from what lies in a slot that such bytes may reach (Allocation.late).
* After a deadline of a call without another path everything is as with one agent: the transfer
  becomes an orphan, and its memory rests (pending_targets).

A path that rests is probed by a thread: first whether anything answers where the agent there
listens, then by a small read. Without the first step UCX would try to connect in pauses that grow
to minutes.

Not here: which cards there are (nic_choice.py), one agent's transfers (nixl_transport.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mooncake_store.errors import TransferFailed, TransferTimeout, WriteGivenUp
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.host_topology import has_carrier
from mooncake_store.transports.nixl_agent import AgentDevices, NixlUnavailable
from mooncake_store.transports.nixl_lane import is_reached
from mooncake_store.transports.nixl_transport import (
    LaneFrozen,
    NixlTransport,
    PostedTransfer,
    pause,
)
from mooncake_store.transports.paths.nic_choice import DataNetwork, Interface, nic_pairs
from mooncake_store.transports.paths.nic_paths import (
    LOOK_S,
    NicCounters,
    NicPath,
    Piece,
    cut,
    may_give_up,
    next_path,
    part_bytes_for,
)
from mooncake_store.transports.transport import ByteSpan, LocalSpan, TransferBatch, Transport

log = logging.getLogger("mooncake_store.store")
PROBE_BYTES = 4096
PROBE_LOOK_S = 0.1
WANTED_S = 60.0  # paths that nobody has wanted for so long are not probed
NODES_MAX = 1_024


@dataclass(slots=True)
class NicRoute:
    """A path to one incarnation of a node."""

    nic: Interface  # of this host
    node: NodeInfo  # as the agent of the card there has it; its address is where that listens
    path: NicPath
    wanted_s: float = 0.0  # when a call wanted it last
    probe: PostedTransfer | None = None  # of the probing thread


class MultiNicTransport(Transport):
    """See transport.Transport, and the module's docstring."""

    name = "nixl"

    def __init__(self, network: DataNetwork, is_same_host: Callable[[NodeInfo], bool]) -> None:
        super().__init__()
        self.lock = threading.Lock()  # of every NicPath
        self._network = network
        self._is_same_host = is_same_host
        self._shared = NixlTransport(AgentDevices(network.shared_devices))
        self._making = threading.Lock()
        self._cards: dict[str, NixlTransport] = {}  # from the name of the card
        self._buffers: list[ByteArray] = []
        self._nics = {nic.name: NicCounters() for nic in network.nics}
        self._routes: dict[str, tuple[str, list[NicRoute]]] = {}  # node_id -> incarnation, routes
        self.scratch = np.zeros(PROBE_BYTES, np.uint8)  # for probes; what it holds matters to none
        self._stop = threading.Event()
        self._prober: threading.Thread | None = None
        if network.missing:
            log.warning("network cards %s are not there", ", ".join(network.missing))

    # ---- who is reached how

    def reaches(self, node: NodeInfo, is_same_host: bool) -> bool:
        """Can NIXL move bytes between this process and the node?"""
        if not is_same_host and nic_pairs(self._network.nics, node.nics):
            return True
        return self._shared.reaches(node, is_same_host) and (
            is_same_host or not self._network.is_closed
        )

    def routes(self, node: NodeInfo) -> list[NicRoute]:
        """The paths to this incarnation of a node; none: by the shared agent."""
        with self.lock:
            known = self._routes.get(node.node_id)
            if known is not None and known[0] == node.incarnation:
                return known[1]
            self._forget(node.node_id)
            made = [
                self._route(node, own, there)
                for own, there in nic_pairs(self._network.nics, node.nics)
            ]
            self._routes[node.node_id] = node.incarnation, made
            while len(self._routes) > NODES_MAX:
                self._forget(next(iter(self._routes)))
            return made

    def _route(self, node: NodeInfo, own: int, there: int) -> NicRoute:
        nic, far = self._network.nics[own], node.nics[there]
        peer = f"{node.node_id}/{far.nic}"  # of a card here it may reach two cards there
        address = far.addresses[0] if far.addresses else ""
        address = f"[{address}]" if ":" in address else address
        info = replace(
            node,
            node_id=peer,
            agent_name=far.agent_name,
            agent_metadata=far.agent_metadata,
            data_address=f"{address}:{far.port}" if address and far.port else "",
        )
        has_rdma = bool(nic.rdma_devices) and far.has_rdma
        path = NicPath(peer, self._nics[nic.name], has_rdma)
        return NicRoute(nic, info, path)

    def _forget(self, node_id: str) -> None:
        _, routes = self._routes.pop(node_id, ("", []))
        for route in routes:
            route.path.forget()

    def card(self, nic: Interface) -> NixlTransport:
        """The transport of one card, made at its first use. TransferFailed while it cannot be."""
        with self._making:
            made = self._cards.get(nic.name)
            if made is None:
                if self._stop.is_set():
                    raise TransferFailed("this transport is closed")
                if not has_carrier(nic.name):
                    raise TransferFailed(f"network card {nic.name} is down")
                devices = AgentDevices(nic.ucx_devices, is_tcp_only=not nic.rdma_devices)
                try:
                    made = NixlTransport(devices)
                    for buffer in [self.scratch, *self._buffers]:
                        made.remember(buffer)
                except NixlUnavailable as error:
                    raise TransferFailed(f"network card {nic.name}: {error}") from error
                self._cards[nic.name] = made
            return made

    def begin(self, route: NicRoute, batch: TransferBatch) -> PostedTransfer:
        """TransferFailed, too, while the card is down."""
        try:
            return self.card(route.nic).begin(batch)
        except NixlUnavailable as error:  # it wanted a further agent
            raise TransferFailed(f"network card {route.nic.name}: {error}") from error

    def _made(self) -> list[NixlTransport]:
        with self._making:
            return [self._shared, *self._cards.values()]

    # ---- the contract

    def keeps_order(self, node: NodeInfo) -> bool:
        return self._is_same_host(node) and self._shared.keeps_order(node)

    def register(self, buffer: ByteArray) -> None:
        with self._making:
            self._buffers = [*self._buffers, buffer]
            cards = list(self._cards.values())
        self._shared.register(buffer)
        for card in cards:
            card.remember(buffer)  # it may be down at this moment

    def unregister(self, buffer: ByteArray) -> None:
        address = int(buffer.ctypes.data)
        with self._making:
            self._buffers = [each for each in self._buffers if each.ctypes.data != address]
            cards = list(self._cards.values())
        for transport in [self._shared, *cards]:
            transport.unregister(buffer)

    def make_lanes(self, count: int) -> None:
        """See NixlTransport; cards make theirs when they are first used."""
        self._shared.make_lanes(count)

    def connect(self, node: NodeInfo) -> None:
        routes = [] if self._is_same_host(node) else self.routes(node)
        if not routes:
            self._shared.connect(node)
        for route in routes:
            self.card(route.nic).connect(route.node)

    def _transfer(self, batch: TransferBatch) -> None:
        is_same_host = self._is_same_host(batch.node)
        routes = [] if is_same_host else self.routes(batch.node)
        if routes:
            SplitTransfer(self, batch, routes).run()
        elif is_same_host or not self._network.is_closed:
            self._shared.move(batch)
        else:
            raise TransferFailed(
                f"node {batch.node.node_id} shares no trusted network card with this host"
            )

    def pending_targets(self) -> list[LocalSpan]:
        return [
            (buffer, span)
            for transport in self._made()
            for buffer, span in transport.pending_targets()
            if buffer is not self.scratch
        ]

    def disconnect(self, node_id: str) -> bool:
        with self.lock:
            _, routes = self._routes.get(node_id, ("", []))
        is_over = self._shared.disconnect(node_id)
        for route in routes:
            for transport in self._made():
                is_over &= transport.disconnect(route.node.node_id)
        if is_over:  # else they name what is still to be disconnected
            with self.lock:
                self._forget(node_id)
        return is_over

    def nic_counters(self) -> dict[str, NicCounters]:
        """By the name of each card of this host that has an agent of its own."""
        with self.lock:
            return {name: replace(counters) for name, counters in self._nics.items()}

    def close(self) -> None:
        self._stop.set()
        with self._making:
            prober, self._prober = self._prober, None
        if prober is not None:
            prober.join()
        for transport in self._made():
            transport.close()

    # ---- probing

    def note_rest(self, route: NicRoute, why: object) -> None:
        """A path has begun to rest: see to it that it is probed."""
        log.warning("network card %s to %s rests: %s", route.nic.name, route.path.peer, why)
        with self._making:
            if self._prober is None and not self._stop.is_set():
                self._prober = threading.Thread(target=self._probe_all, name="probe", daemon=True)
                self._prober.start()

    def _probe_all(self) -> None:
        due: list[NicRoute] = []
        while not self._stop.wait(PROBE_LOOK_S):
            now_s = time.monotonic()
            due = [route for route in due if route.probe is not None]  # wanted any more, or not
            with self.lock:
                due += [
                    route
                    for _, routes in self._routes.values()
                    for route in routes
                    if route.path.is_resting
                    and route.probe is None
                    and now_s - route.wanted_s < WANTED_S
                    and now_s >= route.path.probe_s
                ]
            for route in due:
                try:
                    self._probe(route)
                except Exception:  # edge: the other paths must be probed all the same
                    log.exception("probing %s failed", route.path.peer)

    def _probe(self, route: NicRoute) -> None:
        """One step: begin a probe, or look after the one that is under way."""
        try:
            if route.probe is None:
                if not has_carrier(route.nic.name):
                    raise TransferFailed(f"network card {route.nic.name} is down")
                if not is_reached(route.node.data_address, _source(route)):
                    raise TransferFailed("the card there is not reached")
                if self.card(route.nic).has_late_reads(route.node, self.scratch):
                    raise TransferFailed("an earlier probe has not ended yet")
                route.probe = self.begin(route, self.hello(route.node))
            is_done = self.card(route.nic).poll(route.probe)
            if not is_done and time.monotonic() >= route.probe.batch.until_s:
                self.card(route.nic).leave(route.probe)  # TransferTimeout, unless it ends now
                is_done = True
        except TransferFailed as error:
            log.debug("%s to %s: %s", route.nic.name, route.path.peer, error)
            route.probe = None
            with self.lock:
                route.path.probe_failed(time.monotonic())
            return
        if is_done:
            route.probe = None
            with self.lock:
                route.path.probe_worked(time.monotonic())
            log.info("network card %s to %s works again", route.nic.name, route.path.peer)

    def hello(self, node: NodeInfo, deadline_s: float = 1.0) -> TransferBatch:
        """A small read that shows whether a path works."""
        span = ByteSpan(0, min(PROBE_BYTES, node.segment_bytes))
        until_s = time.monotonic() + deadline_s
        return TransferBatch(node, [span], [(self.scratch, span)], until_s, is_read=True)


def _source(route: NicRoute) -> str:
    """The address of the card here from which the one there is reached."""
    is_v6 = route.node.data_address.startswith("[")
    return next((each for each in route.nic.addresses if (":" in each) == is_v6), "")


@dataclass(slots=True, eq=False)
class _PostedPart:
    pieces: list[Piece]  # none: a small read, to see whether its path works
    size_bytes: int
    at: int  # which path
    posted: PostedTransfer
    posted_s: float
    allowance_s: float
    waited_s: float = 0.0


class SplitTransfer:
    """One call over several paths, from its first part to its last. One thread's own."""

    def __init__(
        self, owner: MultiNicTransport, batch: TransferBatch, routes: Sequence[NicRoute]
    ) -> None:
        self._owner, self._batch, self._routes = owner, batch, routes
        self._paths = [route.path for route in routes]
        lengths_bytes = [length for _, length in batch.remote]
        now_s = time.monotonic()
        with owner.lock:
            working = sum(not path.is_resting for path in self._paths)
            for route in routes:
                route.wanted_s = now_s
        self._left = deque(cut(lengths_bytes, part_bytes_for(sum(lengths_bytes), working)))
        self._posted: list[_PostedPart] = []
        self._failures = 0
        self._error: TransferFailed | None = None  # no more parts are posted
        self._looked_s = now_s

    def run(self) -> None:
        moved_s = time.monotonic()
        while self._posted or (self._left and self._error is None):
            while self._left and self._error is None and self._post_next():
                pass
            if self._look():
                moved_s = time.monotonic()
            elif time.monotonic() >= self._batch.until_s:
                self._leave_all()
                break
            else:
                pause(moved_s)
            if not self._left and all(not part.pieces for part in self._posted):
                self._leave_all()  # small reads that nobody waits for
                break
        if self._error is not None:
            raise self._error

    # ---- posting

    def _post_next(self) -> bool:
        """Post the next part, if a path has room for it."""
        under_way = [sum(part.at == at for part in self._posted) for at in range(len(self._paths))]
        with self._owner.lock:
            at = next_path(self._paths, under_way)
            if at is None and not self._posted:  # all rest; one of them may work by now
                at = next_path(self._paths, under_way, is_last_resort=True)
        if at is None:
            return False
        pieces = self._left.popleft()
        if not self._post(at, pieces, self._part(at, pieces)):
            self._left.appendleft(pieces)
        return True

    def _part(self, at: int, pieces: Sequence[Piece]) -> TransferBatch:
        """These pieces as a batch for the agents of a path."""
        batch = self._batch
        remote = [
            ByteSpan(batch.remote[index].offset_bytes + start, length)
            for index, start, length in pieces
        ]
        local = [
            (batch.local[index][0], ByteSpan(batch.local[index][1].offset_bytes + start, length))
            for index, start, length in pieces
        ]
        node = self._routes[at].node
        return TransferBatch(node, remote, local, batch.until_s, batch.is_read)

    def _post(self, at: int, pieces: list[Piece], batch: TransferBatch) -> bool:
        route, size_bytes = self._routes[at], sum(span.length_bytes for span in batch.remote)
        try:
            posted = self._owner.begin(route, batch)
        except TransferTimeout as error:  # every lane is busy until the deadline
            self._error = error
            return False
        except TransferFailed as error:
            self._failed(at, error)
            return False
        now_s = time.monotonic()
        with self._owner.lock:
            route.path.began(size_bytes)
            allowance_s = route.path.allowance_s(size_bytes, self._batch.until_s - now_s)
        self._posted.append(_PostedPart(pieces, size_bytes, at, posted, now_s, allowance_s))
        return True

    def _failed(self, at: int, error: TransferFailed) -> None:
        """A path failed. Nothing of the part is under way, so it may go over another one."""
        route = self._routes[at]
        with self._owner.lock:
            was_resting = route.path.is_resting
            route.path.failed(time.monotonic())
        if not was_resting:
            self._owner.note_rest(route, error)
        self._failures += 1
        if self._failures >= 2 * len(self._routes):
            self._error = self._error or error

    # ---- looking after what is under way

    def _look(self) -> bool:
        """Poll every part once. True: one of them came to an end."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, LOOK_S), now_s
        has_moved = False
        for part in list(self._posted):
            if part not in self._posted:
                continue
            part.waited_s += passed_s
            if self._poll(part):
                has_moved = True
            elif part.pieces and part.waited_s > part.allowance_s:
                self._overdue(part)
        return has_moved

    def _poll(self, part: _PostedPart) -> bool:
        """True: it has come to an end."""
        if not part.posted.is_done:
            card = self._owner.card(self._routes[part.at].nic)
            try:
                if not card.poll(part.posted):
                    return False
            except LaneFrozen:
                self._take(part)
                self._void(part)
                return True
            except TransferFailed as error:
                self._take(part)
                self._failed(part.at, error)
                if part.pieces:
                    self._left.appendleft(part.pieces)
                return True
        self._take(part)
        now_s = time.monotonic()
        with self._owner.lock:
            self._paths[part.at].moved(
                part.size_bytes,
                self._batch.is_read or not part.pieces,
                now_s - part.posted_s,
                now_s,
            )
        return True

    def _take(self, part: _PostedPart) -> None:
        self._posted.remove(part)
        with self._owner.lock:
            self._paths[part.at].ended(part.size_bytes)

    def _void(self, part: _PostedPart) -> None:
        """A part was given up: it is read again, but never written again."""
        if not part.pieces:
            return
        if self._batch.is_read:
            self._left.appendleft(part.pieces)
            return
        self._error = self._error or WriteGivenUp(
            f"node {self._batch.node.node_id}: network card {self._routes[part.at].nic.name} got "
            "stuck in the middle of a write: the slots may still be written, take others"
        )

    def _overdue(self, part: _PostedPart) -> None:
        """Give it up if another path works; find out whether one does."""
        path = self._paths[part.at]
        others = [each for each in self._paths if each is not path]
        with self._owner.lock:
            is_over = may_give_up(path, others, part.posted_s)
        if is_over:
            self._give_up(part)
            return
        asked = {each.at for each in self._posted if not each.pieces}
        for at, other in enumerate(self._paths):
            if other is not path and at not in asked and not other.is_resting:
                node = self._routes[at].node
                left_s = self._batch.until_s - time.monotonic()
                self._post(at, [], self._owner.hello(node, left_s))

    def _give_up(self, part: _PostedPart) -> None:
        route = self._routes[part.at]
        self._owner.card(route.nic).freeze(route.node.node_id)
        if not part.posted.lane.is_frozen:
            part.allowance_s = float("inf")  # too many agents are frozen: wait for the deadline
            return
        self._take(part)
        with self._owner.lock:
            was_resting = route.path.is_resting
            route.path.gave_up(time.monotonic())
        if not was_resting:
            self._owner.note_rest(route, f"nothing came for {part.waited_s:.2f} s")
        self._void(part)

    def _leave_all(self) -> None:
        """The deadline has passed: what is under way becomes orphans."""
        for part in list(self._posted):
            self._take(part)
            card = self._owner.card(self._routes[part.at].nic)
            try:
                card.leave(part.posted)
            except LaneFrozen:
                self._void(part)
            except TransferFailed as error:
                if part.pieces:
                    self._error = _graver(self._error, error)
        if self._left and self._error is None:
            self._error = TransferTimeout(
                f"node {self._batch.node.node_id} did not move all bytes within the deadline"
            )


def _graver(one: TransferFailed | None, other: TransferFailed) -> TransferFailed:
    """That of the two after which more may still be under way."""
    return other if one is None or isinstance(other, TransferTimeout) else one
