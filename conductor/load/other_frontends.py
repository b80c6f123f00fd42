"""Reservations for requests that other frontends routed, from the notes of these frontends.

A request routed by another frontend is an in-flight request too (cluster.py). Its predicted load is
reserved at its prefill worker, decode worker and sender, and reconciled with worker reports. It
differs from a request of this frontend in two ways:

- Its note arrives late. A worker report may have counted the request before, as *unattributed* work
  (work that no reservation explains). The unattributed work is then reduced, so that the request
  does not count twice.
- The note of its end may be lost. If a batch of a frontend's notes is missing, it is unknown which
  requests have ended. All reservations for that frontend then become unattributed work. The next
  report of each worker, at most half a second later, replaces this work. Notes after the gap are
  used again. The reservations also become unattributed work if no batch arrives for
  frontend_silent_s_max, or after the last batch of a frontend that shuts down.

Notes improve decisions, but no decision needs them. Without notes, a decision uses this frontend's
reservations and the worker reports. A worker that receives more than it can hold refuses requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from conductor.load.cluster import Cluster
from conductor.messages import Prediction, Request, Route
from conductor.notes import EndedNote, NoteBatch, PrefilledNote, RoutedNote

SMALL_TENANTS = "\0"  # stands for all tenants that a batch does not name
FRONTENDS_MAX = 256  # above it, the frontend that was silent for longest is dropped


def _digest(frontend: str, key: bytes) -> bytes:
    return blake2b(frontend.encode() + key, digest_size=8).digest()


@dataclass(slots=True)
class _KnownFrontend:
    name: str
    number: int  # number of its latest batch
    latest_batch_s: float
    wanted_of: Mapping[str, float] = field(default_factory=dict)  # tenant -> prefill s per second
    tenants: dict[int, str] = field(default_factory=dict)  # RoutedNote.number -> tenant

    def request_id(self, number: int) -> str:
        """The id of the in-flight request with this RoutedNote.number."""
        return f"{self.name}/{number}"


class OtherFrontends:
    """Reserves load for the requests of other frontends, as long as notes arrive without gaps."""

    def __init__(self, cluster: Cluster, silence_s_max: float) -> None:
        self._cluster = cluster
        self._silence_s_max = silence_s_max
        self._known: dict[str, _KnownFrontend] = {}
        self.wanted_of: dict[str, float] = {}  # tenant -> prefill s per s, over all other frontends
        self._in_flight_of: Counter[str] = Counter()  # requests by tenant; no zero entries
        self.batches_received = 0
        self.batches_missed = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def requests(self) -> int:
        """In-flight requests of other frontends."""
        return sum(len(known.tenants) for known in self._known.values())

    def in_flight_of(self, tenant: str) -> int:
        """In-flight requests of this tenant at other frontends."""
        return self._in_flight_of[tenant]

    def _sum_wanted(self) -> None:
        self.wanted_of = {}
        for known in self._known.values():
            for tenant, per_s in known.wanted_of.items():
                self.wanted_of[tenant] = self.wanted_of.get(tenant, 0.0) + per_s

    def turn(self, own: str, key: bytes) -> int:
        """Position of the frontend `own` in the order in which frontends may act on `key`; 0 is
        first. All frontends compute the same order. It differs by key (rendezvous hashing)."""
        first = _digest(own, key)
        return sum(_digest(frontend, key) < first for frontend in self._known)

    def on_batch(self, batch: NoteBatch, now_s: float) -> bool:
        """Apply a batch of notes. False if the batch is ignored as a duplicate or as late."""
        known = self._known.get(batch.frontend)
        if known is None:
            if len(self._known) >= FRONTENDS_MAX:
                quietest = min(self._known.values(), key=lambda each: each.latest_batch_s)
                self._drop(quietest, quietest.latest_batch_s)
            known = _KnownFrontend(batch.frontend, batch.number - 1, now_s)
            self._known[batch.frontend] = known
        missed = batch.number - known.number - 1
        if missed < 0:
            return False
        if missed:
            self.batches_missed += missed
            self._give_up(known, now_s)
        self.batches_received += 1
        known.number, known.latest_batch_s = batch.number, now_s
        rest = max(0.0, batch.wanted_per_s - sum(batch.wanted_of.values()))
        known.wanted_of = {**batch.wanted_of, SMALL_TENANTS: rest}
        self._sum_wanted()
        offset_s = now_s - batch.sent_s  # from the sender's clock to this one, assuming no delay
        for routed in batch.routed:
            self._routed(known, routed, offset_s, now_s)
        for prefilled in batch.prefilled:
            self._prefilled(known, prefilled, offset_s, now_s)
        for ended in batch.ended:
            self._ended(known, ended, now_s)
        if batch.is_last:
            self._drop(known, now_s)
        return True

    def expire(self, now_s: float) -> None:
        """Drop the frontends that were silent for too long."""
        for known in list(self._known.values()):
            if now_s - known.latest_batch_s > self._silence_s_max:
                self._drop(known, now_s)

    def _drop(self, known: _KnownFrontend, now_s: float) -> None:
        self._give_up(known, now_s)
        del self._known[known.name]
        self._sum_wanted()

    def _routed(
        self, known: _KnownFrontend, note: RoutedNote, offset_s: float, now_s: float
    ) -> None:
        prefill = self._cluster.workers.get(note.prefill)
        decode = self._cluster.workers.get(note.decode)
        if prefill is None or decode is None or note.number in known.tenants:
            return  # a worker is unknown here, or the note is a duplicate
        routed_at_s = min(now_s, note.at_s + offset_s)
        request_id = known.request_id(note.number)
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
        known.tenants[note.number] = note.tenant
        self._in_flight_of[note.tenant] += 1
        send_s = note.send_s - (now_s - routed_at_s)
        self._cluster.reserve(route, (prefill, decode), request, send_s, now_s)
        routed = self._cluster.in_flight[request_id]
        routed.is_elsewhere, routed.routed_at_s = True, routed_at_s
        self._cluster.attribute(routed, routed_at_s, now_s)

    def _prefilled(
        self, known: _KnownFrontend, note: PrefilledNote, offset_s: float, now_s: float
    ) -> None:
        routed = self._cluster.in_flight.get(known.request_id(note.number))
        if routed is None or routed.prefill_done:
            return
        ended_s = min(now_s, note.at_s + offset_s)
        self._cluster.learn_prefill(routed, note.cached_tokens, note.seconds, ended_s, now_s)
        self._cluster.prefill_finished(routed, now_s)
        self._cluster.attribute(routed, ended_s, now_s)

    def _ended(self, known: _KnownFrontend, note: EndedNote, now_s: float) -> None:
        if (tenant := known.tenants.pop(note.number, None)) is not None:
            self._forget_tenants([tenant])
        routed = self._cluster.drop(known.request_id(note.number), now_s)
        if routed is not None:
            output_tokens = None if note.output_tokens < 0 else note.output_tokens
            self._cluster.learn_decode(routed, output_tokens, now_s)

    def _give_up(self, known: _KnownFrontend, now_s: float) -> None:
        """Turn the reservations of the frontend `known` into unattributed work."""
        for number in known.tenants:
            self._cluster.disown(known.request_id(number), now_s)
        self._forget_tenants(known.tenants.values())
        known.tenants.clear()

    def _forget_tenants(self, tenants: Iterable[str]) -> None:
        """Count one request of each of these tenants as ended."""
        for tenant in tenants:
            self._in_flight_of[tenant] -= 1
            if not self._in_flight_of[tenant]:
                del self._in_flight_of[tenant]

    def check(self) -> None:
        in_flight = self._cluster.in_flight
        elsewhere = {name for name, routed in in_flight.items() if routed.is_elsewhere}
        known = self._known.values()
        announced = {each.request_id(number) for each in known for number in each.tenants}
        # A request older than request_s_max leaves the cluster but stays in `tenants`.
        assert elsewhere <= announced, "a request of an unknown frontend is reserved"
        tenants = Counter(tenant for each in known for tenant in each.tenants.values())
        assert self._in_flight_of == tenants, "in-flight requests of tenants are miscounted"
        assert len(self._known) <= FRONTENDS_MAX
