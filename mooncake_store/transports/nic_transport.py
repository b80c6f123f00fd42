"""NIXL transport with agents of its own for each network card, so that a card or cable may fail.

A NIXL agent is an endpoint of NIXL in this process; a *lane* is an agent with its lock. The shared
agents (nic_choice.py) serve the nodes of this host, and hosts whose cards have no agents. Any other
transfer is cut into parts. Each part moves over a *path*: a card of this host and a card of the
other host. nic_paths.py chooses the path and decides when a part is abandoned. The thread of a call
posts all its parts and polls them.

Memory of an abandoned part:

- Local memory that the part was reading into can be reused at once. The part's agent has no thread
  and is frozen: it is never called again (nixl_transport.py). So it writes nothing into that
  memory. The part is read again over another path, into the same memory.
- Slots (memory of one block each) that the part was writing cannot be reused. This host's kernel
  keeps the unsent bytes and sends them when the card works again, possibly minutes later. So the
  call raises WriteGivenUp, and the caller writes into other slots (putter.py). The directory does
  not grant the old slots for some time (quarantine). Bytes that arrive after the quarantine corrupt
  the slot's next block. A verified read detects the corruption and is a miss. A read of a part of a
  block, or with `is_verified=False`, checks only the slot's header and does not detect it. No
  checksum is ever computed from slot memory that late bytes may reach (Allocation.late).

Any other part in flight at the call's deadline becomes an orphan (nixl_transport.py).

A thread probes each path in cool-down. The probe first tests whether the remote agent's address
answers, then does a small read. Without the first step UCX (NIXL's network library) would retry the
connection at intervals that grow to minutes.

Not here: which cards get an agent (nic_choice.py), one agent's transfers (nixl_transport.py).
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
    may_abandon,
    next_path,
    part_bytes_for,
)
from mooncake_store.transports.transport import ByteSpan, LocalSpan, TransferBatch, Transport

log = logging.getLogger("mooncake_store.store")
PROBE_BYTES = 4096
PROBE_LOOK_S = 0.1  # seconds between two rounds of the probing thread
WANTED_S = 60.0  # seconds after the last call to a node until its paths are no longer probed
NODES_MAX = 1_024  # nodes whose routes are kept; the oldest is dropped


@dataclass(slots=True)
class NicRoute:
    """A path to one incarnation of a node."""

    nic: Interface  # card of this host
    # The node's record, with the agent of the remote card as its agent: node_id is 'NODE/CARD', and
    # data_address is the address of the remote card's agent.
    node: NodeInfo
    path: NicPath
    wanted_s: float = 0.0  # time.monotonic() of the last call to this node
    probe: PostedTransfer | None = None  # used by the probing thread only


class MultiNicTransport(Transport):
    name = "nixl"

    def __init__(self, network: DataNetwork, is_same_host: Callable[[NodeInfo], bool]) -> None:
        super().__init__()
        # guards _routes, every NicRoute.wanted_s, every NicPath and every NicCounters
        self.lock = threading.Lock()
        self._network = network
        self._is_same_host = is_same_host
        self._shared = NixlTransport(AgentDevices(network.shared_devices))
        self._making = threading.Lock()  # guards _cards, _buffers and _prober
        self._cards: dict[str, NixlTransport] = {}  # by card name
        self._buffers: list[ByteArray] = []
        self._nics = {nic.name: NicCounters() for nic in network.nics}
        self._routes: dict[str, tuple[str, list[NicRoute]]] = {}  # node_id -> incarnation, routes
        # target of probes; its content is never used
        self.scratch = np.zeros(PROBE_BYTES, np.uint8)
        self._stop = threading.Event()
        self._prober: threading.Thread | None = None
        if network.missing:
            log.warning("network cards %s do not exist", ", ".join(network.missing))

    def reaches(self, node: NodeInfo, is_same_host: bool) -> bool:
        if not is_same_host and nic_pairs(self._network.nics, node.nics):
            return True
        return self._shared.reaches(node, is_same_host) and (
            is_same_host or not self._network.is_closed
        )

    def routes(self, node: NodeInfo) -> list[NicRoute]:
        """The paths to this incarnation of a node. Empty: no pair of cards reaches it, so only the
        shared agent can serve the node."""
        with self.lock:
            known = self._routes.get(node.node_id)
            if known is not None and known[0] == node.incarnation:
                return known[1]
            self._forget(node.node_id)
            made = [
                self._route(node, local_at, remote_at)
                for local_at, remote_at in nic_pairs(self._network.nics, node.nics)
            ]
            self._routes[node.node_id] = node.incarnation, made
            while len(self._routes) > NODES_MAX:
                self._forget(next(iter(self._routes)))
            return made

    def _route(self, node: NodeInfo, local_at: int, remote_at: int) -> NicRoute:
        nic, peer_nic = self._network.nics[local_at], node.nics[remote_at]
        peer = f"{node.node_id}/{peer_nic.nic}"  # one card here may reach two cards of the node
        address = peer_nic.addresses[0] if peer_nic.addresses else ""
        address = f"[{address}]" if ":" in address else address
        info = replace(
            node,
            node_id=peer,
            agent_name=peer_nic.agent_name,
            agent_metadata=peer_nic.agent_metadata,
            data_address=f"{address}:{peer_nic.port}" if address and peer_nic.port else "",
        )
        has_rdma = bool(nic.rdma_devices) and peer_nic.has_rdma
        path = NicPath(peer, self._nics[nic.name], has_rdma)
        return NicRoute(nic, info, path)

    def _forget(self, node_id: str) -> None:
        _, routes = self._routes.pop(node_id, ("", []))
        for route in routes:
            route.path.forget()

    def card(self, nic: Interface) -> NixlTransport:
        """The transport of one card, made on first use. Raises TransferFailed if it cannot be made
        now."""
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
        """Post a part over a path. Raises TransferFailed, also if the card is down."""
        try:
            return self.card(route.nic).begin(batch)
        # a new lane could not be made, or memory could not be registered
        except NixlUnavailable as error:
            raise TransferFailed(f"network card {route.nic.name}: {error}") from error

    def _made(self) -> list[NixlTransport]:
        with self._making:
            return [self._shared, *self._cards.values()]

    def keeps_order(self, node: NodeInfo) -> bool:
        return self._is_same_host(node) and self._shared.keeps_order(node)

    def register(self, buffer: ByteArray) -> None:
        with self._making:
            self._buffers = [*self._buffers, buffer]
            cards = list(self._cards.values())
        self._shared.register(buffer)
        for card in cards:
            # The card's next transfer registers the buffer. A registration may fail now, because
            # the card may be down.
            card.remember(buffer)

    def unregister(self, buffer: ByteArray) -> None:
        address = int(buffer.ctypes.data)
        with self._making:
            self._buffers = [each for each in self._buffers if each.ctypes.data != address]
            cards = list(self._cards.values())
        for transport in [self._shared, *cards]:
            transport.unregister(buffer)

    def make_lanes(self, count: int) -> None:
        """Make shared agents up to `count` now (NixlTransport.make_lanes). A card's agents are made
        when transfers need them."""
        self._shared.make_lanes(count)

    def _transfer(self, batch: TransferBatch) -> None:
        is_same_host = self._is_same_host(batch.node)
        routes = [] if is_same_host else self.routes(batch.node)
        if routes:
            SplitTransfer(self, batch, routes).run()
        elif is_same_host or not self._network.is_closed:
            self._shared.move(batch)
        else:
            raise TransferFailed(
                f"this host or node {batch.node.node_id} has no usable card of "
                "MOONCAKE_TRUSTED_NICS, so NIXL cannot reach the node"
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
        is_disconnected = self._shared.disconnect(node_id)
        for route in routes:
            for transport in self._made():
                is_disconnected &= transport.disconnect(route.node.node_id)
        if is_disconnected:  # otherwise the next disconnect needs the node ids of these routes
            with self.lock:
                self._forget(node_id)
        return is_disconnected

    def nic_counters(self) -> dict[str, NicCounters]:
        """Counters by card name, for each card of this host that has its own agent."""
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

    def note_cool_down(self, route: NicRoute, why: object) -> None:
        """Log that a path's cool-down has started; start the probing thread if none runs."""
        log.warning(
            "path from card %s to %s is in cool-down: %s", route.nic.name, route.path.peer, why
        )
        with self._making:
            if self._prober is None and not self._stop.is_set():
                self._prober = threading.Thread(target=self._probe_all, name="probe", daemon=True)
                self._prober.start()

    def _probe_all(self) -> None:
        due: list[NicRoute] = []
        while not self._stop.wait(PROBE_LOOK_S):
            now_s = time.monotonic()
            due = [route for route in due if route.probe is not None]  # still in flight
            with self.lock:
                due += [
                    route
                    for _, routes in self._routes.values()
                    for route in routes
                    if route.path.is_cooling_down
                    and route.probe is None
                    and now_s - route.wanted_s < WANTED_S
                    and now_s >= route.path.probe_s
                ]
            for route in due:
                try:
                    self._probe(route)
                except Exception:  # Catch all: one path's bug must not stop the probing of others
                    log.exception("probing %s failed", route.path.peer)

    def _probe(self, route: NicRoute) -> None:
        """Start a probe of this path if none is in flight, then poll the probe once."""
        try:
            if route.probe is None:
                if not has_carrier(route.nic.name):
                    raise TransferFailed(f"network card {route.nic.name} is down")
                if not is_reached(route.node.data_address, _source(route)):
                    raise TransferFailed("the remote card does not answer")
                if self.card(route.nic).has_late_reads(route.node, self.scratch):
                    raise TransferFailed("an earlier probe is still in flight")
                route.probe = self.begin(route, self.test_read(route.node))
            is_done = self.card(route.nic).poll(route.probe)
            if not is_done and time.monotonic() >= route.probe.batch.until_s:
                # raises TransferTimeout unless the probe ends now
                self.card(route.nic).leave(route.probe)
                is_done = True
        except TransferFailed as error:
            log.debug("probe from card %s to %s failed: %s", route.nic.name, route.path.peer, error)
            route.probe = None
            with self.lock:
                route.path.probe_failed(time.monotonic())
            return
        if is_done:
            route.probe = None
            with self.lock:
                route.path.probe_worked(time.monotonic())
            log.info("path from card %s to %s works again", route.nic.name, route.path.peer)

    def test_read(self, node: NodeInfo, deadline_s: float = 1.0) -> TransferBatch:
        """A small read that shows whether a path works."""
        span = ByteSpan(0, min(PROBE_BYTES, node.segment_bytes))
        until_s = time.monotonic() + deadline_s
        return TransferBatch(node, [span], [(self.scratch, span)], until_s, is_read=True)


def _source(route: NicRoute) -> str:
    """The local card's first address of the remote address's family (IPv4 or IPv6); "" if it has
    none."""
    is_v6 = route.node.data_address.startswith("[")
    return next((each for each in route.nic.addresses if (":" in each) == is_v6), "")


@dataclass(slots=True, eq=False)
class _PostedPart:
    pieces: list[Piece]  # empty: the part is a `test_read`, which moves no bytes of the call
    size_bytes: int  # of all pieces together
    at: int  # index of the path
    posted: PostedTransfer
    posted_s: float  # time.monotonic() of the post
    allowance_s: float  # the part is overdue once waited_s exceeds this
    waited_s: float = 0.0  # time spent polling since the post


class SplitTransfer:
    """One call over several paths, from its first part to its last. Used by one thread."""

    def __init__(
        self, owner: MultiNicTransport, batch: TransferBatch, routes: Sequence[NicRoute]
    ) -> None:
        self._owner, self._batch, self._routes = owner, batch, routes
        self._paths = [route.path for route in routes]
        lengths_bytes = [length for _, length in batch.remote]
        now_s = time.monotonic()
        with owner.lock:
            working = sum(not path.is_cooling_down for path in self._paths)
            for route in routes:
                route.wanted_s = now_s
        self._left = deque(cut(lengths_bytes, part_bytes_for(sum(lengths_bytes), working)))
        self._posted: list[_PostedPart] = []
        self._failures = 0
        self._error: TransferFailed | None = None  # set: no further parts are posted
        self._looked_s = now_s

    def run(self) -> None:
        moved_s = time.monotonic()
        while self._posted or (self._left and self._error is None):
            while self._left and self._error is None and self._post_next():
                pass
            if self._poll_all():
                moved_s = time.monotonic()
            elif time.monotonic() >= self._batch.until_s:
                self._leave_all()
                break
            else:
                pause(moved_s)
            if not self._left and all(not part.pieces for part in self._posted):
                self._leave_all()  # only test reads are left; the call does not wait for them
                break
        if self._error is not None:
            raise self._error

    def _post_next(self) -> bool:
        """Post the next part if a path has room for it. Returns False if no path has room. If the
        post fails, the part returns to the head of the queue, and the result is True."""
        under_way = [sum(part.at == at for part in self._posted) for at in range(len(self._paths))]
        with self._owner.lock:
            at = next_path(self._paths, under_way)
            if at is None and not self._posted:  # all paths are in cool-down; try one anyway
                at = next_path(self._paths, under_way, is_last_resort=True)
        if at is None:
            return False
        pieces = self._left.popleft()
        if not self._post(at, pieces, self._part(at, pieces)):
            self._left.appendleft(pieces)
        return True

    def _part(self, at: int, pieces: Sequence[Piece]) -> TransferBatch:
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
        """Start the cool-down of a path whose part failed. Nothing of the part is in flight, so
        another path may move it."""
        route = self._routes[at]
        with self._owner.lock:
            was_cooling_down = route.path.is_cooling_down
            route.path.failed(time.monotonic())
        if not was_cooling_down:
            self._owner.note_cool_down(route, error)
        self._failures += 1
        # The call fails after two failures per path on average.
        if self._failures >= 2 * len(self._routes):
            self._error = self._error or error

    def _poll_all(self) -> bool:
        """Poll every part once. Returns True if at least one has ended."""
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
        if not part.posted.is_done:
            card = self._owner.card(self._routes[part.at].nic)
            try:
                if not card.poll(part.posted):
                    return False
            except LaneFrozen:
                self._take(part)
                self._requeue_or_fail(part)
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

    def _requeue_or_fail(self, part: _PostedPart) -> None:
        """Handle a part whose lane is frozen: a read is queued again, a write ends the call with
        WriteGivenUp."""
        if not part.pieces:
            return
        if self._batch.is_read:
            self._left.appendleft(part.pieces)
            return
        self._error = self._error or WriteGivenUp(
            f"node {self._batch.node.node_id}: a write over network card "
            f"{self._routes[part.at].nic.name} was abandoned; late bytes may still change these "
            "slots, so use other slots"
        )

    def _overdue(self, part: _PostedPart) -> None:
        """Abandon the part if may_abandon allows it: no RDMA, and another path has completed a
        transfer since the post. Else post a test read on each other path."""
        path = self._paths[part.at]
        others = [each for each in self._paths if each is not path]
        with self._owner.lock:
            is_allowed = may_abandon(path, others, part.posted_s)
        if is_allowed:
            self._abandon(part)
            return
        tested = {each.at for each in self._posted if not each.pieces}
        for at, other in enumerate(self._paths):
            if other is not path and at not in tested and not other.is_cooling_down:
                node = self._routes[at].node
                left_s = self._batch.until_s - time.monotonic()
                self._post(at, [], self._owner.test_read(node, left_s))

    def _abandon(self, part: _PostedPart) -> None:
        route = self._routes[part.at]
        self._owner.card(route.nic).freeze(route.node.node_id)
        if not part.posted.lane.is_frozen:
            # The part waits until the deadline. Its lane may not be frozen, because too many lanes
            # are frozen already, or RDMA with another node is in flight on it.
            part.allowance_s = float("inf")
            return
        self._take(part)
        with self._owner.lock:
            was_cooling_down = route.path.is_cooling_down
            route.path.abandoned(time.monotonic())
        if not was_cooling_down:
            self._owner.note_cool_down(route, f"no progress for {part.waited_s:.2f} s")
        self._requeue_or_fail(part)

    def _leave_all(self) -> None:
        """End the call: its parts still in flight become orphans (nixl_transport.py). Sets `_error`
        if bytes of the call are missing."""
        for part in list(self._posted):
            self._take(part)
            card = self._owner.card(self._routes[part.at].nic)
            try:
                card.leave(part.posted)
            except LaneFrozen:
                self._requeue_or_fail(part)
            except TransferFailed as error:
                if part.pieces:
                    self._error = _more_severe(self._error, error)
                    with self._owner.lock:
                        self._paths[part.at].timed_out(time.monotonic())
        if self._left and self._error is None:
            self._error = TransferTimeout(
                f"node {self._batch.node.node_id} did not transfer all bytes within the deadline"
            )


def _more_severe(one: TransferFailed | None, other: TransferFailed) -> TransferFailed:
    """The error to raise of two. TransferTimeout has precedence, because the caller must know that
    late bytes may still arrive."""
    return other if one is None or isinstance(other, TransferTimeout) else one
