"""The requests that other frontends routed, as far as they say so.

A request routed elsewhere is an in-flight request like ours (cluster.py): what was predicted for it
is reserved at the same prefill worker, decode worker and sender, and worker reports are laid over
its reservations as over ours. What differs is how it begins and ends:

- It is known late. A worker's report may have counted it already, as *unattributed*; then that much
  of the unattributed work is taken to be this request, so that it does not count twice.
- Its end may never be told. When a batch of a frontend's notes is missing, nobody knows which of
  its requests ended, so all of them are given up: their work goes back to what is unattributed, as
  the last report and the reservations had it, and the next report of each worker, half a second
  later, replaces it by what is really there. The notes that come after the gap count again. The
  same when a frontend falls silent (it died, or the directory did): its streams end with it, and
  reports say when the workers have noticed. A frontend that closes says so.

So notes make decisions better and none of them is needed: whatever is lost, reserved work is what
workers report plus what this conductor itself routed, and a worker that gets more than it can hold
refuses it.

Not here: what is noted (notes.py), how it travels (backends/frontend/routing_notes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from conductor.load.cluster import Cluster
from conductor.messages import Prediction, Request, Route
from conductor.notes import EndedNote, NoteBatch, PrefilledNote, RoutedNote

SMALL_TENANTS = "\0"  # those that a batch does not name, taken for one
FRONTENDS_MAX = 256  # beyond, the one that was silent for the longest is forgotten


def _digest(frontend: str, key: bytes) -> bytes:
    return blake2b(frontend.encode() + key, digest_size=8).digest()


@dataclass(slots=True)
class _KnownFrontend:
    number: int  # of its latest batch
    heard_s: float
    wanted_of: Mapping[str, float] = field(default_factory=dict)
    request_ids: dict[int, str] = field(default_factory=dict)  # by the number of the routing
    tenants: dict[int, str] = field(default_factory=dict)  # of the same


class OtherFrontends:
    """Keeps the requests of other frontends in the cluster, for as long as they are told."""

    def __init__(self, cluster: Cluster, silence_s_max: float) -> None:
        self._cluster = cluster
        self._silence_s_max = silence_s_max
        self._known: dict[str, _KnownFrontend] = {}
        # Prefill seconds per second that all of them were asked for lately, by tenant.
        self.wanted_of: dict[str, float] = {}
        self._in_flight_of: Counter[str] = Counter()  # requests, by tenant; 0 is left out
        self.batches_received = 0
        self.batches_missed = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def requests(self) -> int:
        """How many of the in-flight requests are theirs."""
        return sum(len(known.request_ids) for known in self._known.values())

    def in_flight_of(self, tenant: str) -> int:
        """How many of their requests are this tenant's."""
        return self._in_flight_of[tenant]

    def _sum_wanted(self) -> None:
        self.wanted_of = {}
        for known in self._known.values():
            for tenant, per_s in known.wanted_of.items():
                self.wanted_of[tenant] = self.wanted_of.get(tenant, 0.0) + per_s

    def turn(self, own: str, key: bytes) -> int:
        """Whose turn it is to act on what all see: 0 is first, and all agree on the order, which
        differs from key to key (rendezvous hashing)."""
        first = _digest(own, key)
        return sum(_digest(frontend, key) < first for frontend in self._known)

    def on_batch(self, batch: NoteBatch, now_s: float) -> bool:
        """Notes in the order of their batches; False: it came again or too late, and is passed
        over."""
        known = self._known.get(batch.frontend)
        if known is None:
            self._make_room()
            known = self._known[batch.frontend] = _KnownFrontend(batch.number - 1, now_s)
        missed = batch.number - known.number - 1
        if missed < 0:
            return False
        if missed:
            self.batches_missed += missed
            self._give_up(known, now_s)
        self.batches_received += 1
        known.number, known.heard_s = batch.number, now_s
        rest = max(0.0, batch.wanted_per_s - sum(batch.wanted_of.values()))
        known.wanted_of = {**batch.wanted_of, SMALL_TENANTS: rest}
        self._sum_wanted()
        offset_s = now_s - batch.sent_s  # from its clock to ours; the way took no time
        for routed in batch.routed:
            self._routed(batch.frontend, known, routed, offset_s, now_s)
        for prefilled in batch.prefilled:
            self._prefilled(known, prefilled, offset_s, now_s)
        for ended in batch.ended:
            self._ended(known, ended, now_s)
        if batch.is_last:
            self._give_up(known, now_s)
            del self._known[batch.frontend]
            self._sum_wanted()
        return True

    def expire(self, now_s: float) -> None:
        """Give up the frontends of which nothing was heard for too long."""
        for frontend, known in list(self._known.items()):
            if now_s - known.heard_s > self._silence_s_max:
                self._give_up(known, now_s)
                del self._known[frontend]
                self._sum_wanted()

    def _make_room(self) -> None:
        if len(self._known) >= FRONTENDS_MAX:
            quietest = min(self._known, key=lambda frontend: self._known[frontend].heard_s)
            known = self._known.pop(quietest)
            self._give_up(known, known.heard_s)

    def _routed(
        self, frontend: str, known: _KnownFrontend, note: RoutedNote, offset_s: float, now_s: float
    ) -> None:
        prefill = self._cluster.workers.get(note.prefill)
        decode = self._cluster.workers.get(note.decode)
        if prefill is None or decode is None or note.number in known.request_ids:
            return  # a worker that is not known here (any more) has nothing to reserve at
        routed_at_s = min(now_s, note.at_s + offset_s)
        request_id = f"{frontend}/{note.number}"
        predicted = Prediction(
            queue_s=max(0.0, note.queue_s - (now_s - routed_at_s)),
            transfer_s=note.transfer_s,
            prefill_s=note.prefill_s,
            handover_s=0.0,
            ttft_s=0.0,
            tbt_s=note.tbt_s,
            decode_sequences=0.0,
        )
        route = Route(
            request_id=request_id,
            prefill=prefill.ref,
            decode=decode.ref,
            cached_tokens=note.cached_tokens,
            local_blocks=0,
            fetch_blocks=0,
            fetch_node=note.fetch_node or None,
            predicted=predicted,
            order_key_s=note.order_key_s + offset_s,
        )
        request = Request(
            request_id,
            note.new_tokens + note.cached_tokens,
            (),
            note.output_tokens_max,
            tenant=note.tenant,
        )
        known.request_ids[note.number], known.tenants[note.number] = request_id, note.tenant
        self._in_flight_of[note.tenant] += 1
        send_s = note.send_s - (now_s - routed_at_s)
        self._cluster.reserve(route, (prefill, decode), request, send_s, now_s)
        routed = self._cluster.in_flight[request_id]
        routed.is_elsewhere, routed.routed_at_s = True, routed_at_s
        self._cluster.attribute(routed, routed_at_s, now_s)

    def _prefilled(
        self, known: _KnownFrontend, note: PrefilledNote, offset_s: float, now_s: float
    ) -> None:
        routed = self._cluster.in_flight.get(known.request_ids.get(note.number, ""))
        if routed is None or routed.prefill_done:
            return
        ended_s = min(now_s, note.at_s + offset_s)
        self._cluster.learn_prefill(routed, note.cached_tokens, note.seconds, ended_s, now_s)
        self._cluster.prefill_finished(routed, now_s)
        self._cluster.attribute(routed, ended_s, now_s)

    def _ended(self, known: _KnownFrontend, note: EndedNote, now_s: float) -> None:
        request_id = known.request_ids.pop(note.number, "")
        if request_id:
            self._forget_tenants([known.tenants.pop(note.number)])
        routed = self._cluster.drop(request_id, now_s)
        if routed is not None:
            output_tokens = None if note.output_tokens < 0 else note.output_tokens
            self._cluster.learn_decode(routed, output_tokens, now_s)

    def _give_up(self, known: _KnownFrontend, now_s: float) -> None:
        """What it has routed is known from reports only."""
        for request_id in known.request_ids.values():
            self._cluster.disown(request_id, now_s)
        known.request_ids.clear()
        self._forget_tenants(known.tenants.values())
        known.tenants.clear()

    def _forget_tenants(self, tenants: Iterable[str]) -> None:
        """Of requests that are over, or of which nobody will hear any more."""
        for tenant in tenants:
            self._in_flight_of[tenant] -= 1
            if not self._in_flight_of[tenant]:
                del self._in_flight_of[tenant]

    def check(self) -> None:
        """Prove the invariants."""
        in_flight = self._cluster.in_flight
        elsewhere = {name for name, routed in in_flight.items() if routed.is_elsewhere}
        announced = [name for known in self._known.values() for name in known.request_ids.values()]
        # A request that nobody ended for request_s_max is forgotten by the cluster alone.
        assert elsewhere <= set(announced), "a request of a frontend that nobody knows is reserved"
        assert len(set(announced)) == len(announced)
        tenants = [tenant for known in self._known.values() for tenant in known.tenants.values()]
        assert self._in_flight_of == Counter(tenants) and len(tenants) == len(announced)
        assert len(self._known) <= FRONTENDS_MAX
