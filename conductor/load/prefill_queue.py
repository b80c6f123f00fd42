"""Predicted work of one prefill worker: reservations reconciled with worker reports.

The queue is predicted from two sources. A *reservation* for each routed request, with its cached
prefix and its order key (queue_order.py), is made at once. A report of the worker has the remaining
work and the work of other frontends, but arrives late. Both are combined so that no work counts
twice and no value falls below zero:

- A report *confirms* a reservation that is at least report_lag_s older than the report. Other
  reservations keep their predictions.
- If the report has fewer requests than there are confirmed reservations, the missing requests count
  as done, from the front of the queue. If the remaining confirmed reservations have more tokens
  than the report, their tokens are reduced, from the front of the queue too.
- If the report has more tokens than predicted, no reservation changes. The reason is that a worker
  counts a prompt as uncached until it has looked up the prefix.
- If the report has more requests than there are reservations, the surplus is *unattributed*: from
  another frontend, or from before a restart of the conductor. Unattributed requests get the tokens
  that the reservations do not account for. Their order keys are unknown, so they count as first.

The *head* is the reservation that is being computed. With `preempts`, a request of smaller order
key overtakes the head between two chunks, and the head keeps its computed chunks. Without
`preempts`, the worker finishes a prompt that has begun. Between two reports, the elapsed time
reduces first the unattributed work and then the head, to no less than zero. A head that takes
longer than predicted does not reduce the predicted work of later reservations.

The work of a pipeline group is that of its slowest stage, because the next prompt begins while the
other stages compute the last chunk of a prompt (estimates/pipeline.py).

The predicted wait ignores requests that arrive later and overtake, since their number is unknown.
A request can be overtaken only by requests that arrive within queue_wait_s_max after it.
"""

from __future__ import annotations

import math
from bisect import insort_right
from dataclasses import dataclass

from conductor.estimates.pipeline import PipelineEstimate


@dataclass(slots=True, eq=False)  # equality by identity
class PrefillReservation:
    key_s: float  # order key; the least runs first
    prefix_tokens: int  # prompt tokens that are cached, >= 0
    new_tokens: int  # to compute, > 0
    reserved_at_s: float
    remaining_s: float  # predicted seconds left, >= 0
    done_tokens: int = 0  # computed tokens; kept_tokens <= done_tokens <= new_tokens
    kept_tokens: int = 0  # tokens computed before another request overtook this one, >= 0


class PrefillQueue:
    """Unattributed work, then the head, then the other reservations in the order of their keys."""

    def __init__(self, estimate: PipelineEstimate, now_s: float, preempts: bool = False) -> None:
        # A change of the pipeline group replaces it. The next report recomputes remaining_s.
        self.estimate = estimate
        self._preempts = preempts
        self._reservations: dict[str, PrefillReservation] = {}
        self._ordered: list[PrefillReservation] = []  # the head, then the others by order key
        self._unattributed_s = 0.0  # seconds of unattributed work left at `_as_of_s`, >= 0
        self._unattributed_requests = 0
        self._as_of_s = now_s
        self._head_since_s = now_s  # time up to which `remaining_s` of the head is reduced
        self.step_s = 0.0  # recent mean time in seconds of a step, which cannot be interrupted

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reservations

    @property
    def requests(self) -> int:
        """Requests waiting or running, reserved or unattributed."""
        return len(self._reservations) + self._unattributed_requests

    def work_s(self, now_s: float) -> float:
        """Seconds of predicted work, at the calibrated speed."""
        return self.ahead_s(math.inf, now_s)

    def ahead_s(self, key_s: float, now_s: float) -> float:
        """Seconds until a request with this order key would begin, at the calibrated speed."""
        wait_s = max(0.0, self._unattributed_s - (now_s - self._as_of_s))
        if not self._ordered:
            return wait_s
        head_s = max(0.0, self._ordered[0].remaining_s - self._head_elapsed_s(now_s))
        if self._is_ahead_of_head(key_s):
            return wait_s + min(head_s, self.step_s / 2)
        wait_s += head_s
        for work in self._ordered[1:]:
            if work.key_s <= key_s:
                wait_s += work.remaining_s
        return wait_s

    def behind(self, key_s: float) -> int:
        """Number of reservations that a request with this order key would delay."""
        overtaken = sum(work.key_s > key_s for work in self._ordered[1:])
        return overtaken + self._is_ahead_of_head(key_s)

    def _is_ahead_of_head(self, key_s: float) -> bool:
        return self._preempts and bool(self._ordered) and key_s < self._ordered[0].key_s

    # The columns of prefill_pool.py hold moments, because durations would change with time.

    def moments(self) -> tuple[float, float, float, float]:
        """The end of unattributed work; the end of the head if no request overtakes it; the order
        key below which a request overtakes the head; the order key of the last reservation."""
        unattributed_until_s = self._as_of_s + self._unattributed_s
        if not self._ordered:
            return unattributed_until_s, unattributed_until_s, -math.inf, -math.inf
        head = self._ordered[0]
        busy_until_s = max(self._head_since_s, unattributed_until_s) + head.remaining_s
        head_key_s = head.key_s if self._preempts else -math.inf
        return unattributed_until_s, busy_until_s, head_key_s, self._ordered[-1].key_s

    def positions(self) -> list[tuple[float, float]]:
        """(order key, remaining seconds) of each reservation after the head, in order."""
        return [(work.key_s, work.remaining_s) for work in self._ordered[1:]]

    def _settle(self, now_s: float) -> None:
        """Subtract the time since the last change from the predicted work."""
        if self._ordered:
            head = self._ordered[0]
            head.remaining_s = max(0.0, head.remaining_s - self._head_elapsed_s(now_s))
        self._unattributed_s = max(0.0, self._unattributed_s - (now_s - self._as_of_s))
        self._as_of_s = self._head_since_s = now_s

    def _head_elapsed_s(self, now_s: float) -> float:
        """Seconds for which the head has run. The head starts after unattributed work."""
        began_s = max(self._head_since_s, self._as_of_s + self._unattributed_s)
        return max(0.0, now_s - began_s)

    def reserve(
        self,
        request_id: str,
        new_tokens: int,
        prefix_tokens: int,
        now_s: float,
        key_s: float | None = None,
    ) -> None:
        """Add a routed request. `key_s`: order key; None for first come, first served."""
        assert request_id not in self._reservations, f"{request_id} is reserved already"
        assert new_tokens > 0 and prefix_tokens >= 0, (new_tokens, prefix_tokens)
        seconds = self.estimate.work_s(new_tokens, prefix_tokens)
        order_key_s = now_s if key_s is None else key_s
        work = PrefillReservation(order_key_s, prefix_tokens, new_tokens, now_s, seconds)
        self._reservations[request_id] = work
        if not self._ordered:
            self._head_since_s = now_s
            self._ordered.append(work)
        elif self._is_ahead_of_head(order_key_s):
            self._settle(now_s)
            self._keep_computed_chunks()
            self._ordered.insert(0, work)
        else:
            insort_right(self._ordered, work, lo=self._pinned, key=lambda other: other.key_s)

    @property
    def _pinned(self) -> int:
        """The first queue index at which a reservation may be inserted."""
        return 0 if self._preempts else 1

    def _keep_computed_chunks(self) -> None:
        head = self._ordered[0]
        whole_s = self.estimate.work_s(head.new_tokens, head.prefix_tokens)
        if whole_s > 0:
            share = max(0.0, 1.0 - head.remaining_s / whole_s)
            head.done_tokens = head.kept_tokens = int(share * head.new_tokens)

    def drop(self, request_id: str, now_s: float) -> bool:
        """Remove a finished or cancelled request; False if it was not reserved here."""
        work = self._reservations.pop(request_id, None)
        if work is None:
            return False
        if work is self._ordered[0]:
            # The next prompt began when the slowest pipeline stage had finished this one.
            over_s = self._head_elapsed_s(now_s) - work.remaining_s
            filled_s = self.estimate.fill_s(work.new_tokens, work.prefix_tokens)
            self._head_since_s = now_s - min(filled_s, max(0.0, over_s))
        self._ordered.remove(work)
        return True

    def attribute(self, now_s: float) -> None:
        """Remove one unattributed request, because it is reserved now."""
        if self._unattributed_requests:
            self._settle(now_s)
            self._unattributed_s *= 1.0 - 1.0 / self._unattributed_requests
            self._unattributed_requests -= 1

    def disown(self, request_id: str, now_s: float) -> None:
        """Turn a reservation into unattributed work, because no note of its end will arrive."""
        self._settle(now_s)
        work = self._reservations.get(request_id)
        if work is not None and self.drop(request_id, now_s) and work.done_tokens < work.new_tokens:
            self._unattributed_requests += 1
            self._unattributed_s += work.remaining_s

    def on_report(
        self, queue_tokens: int, requests: int, now_s: float, report_lag_s: float
    ) -> None:
        """Reconcile the reservations with the worker's own counts.

        `requests`: number waiting or running; `queue_tokens`: tokens that they have to compute.
        """
        self._settle(now_s)
        confirmed = [c for c in self._ordered if c.reserved_at_s <= now_s - report_lag_s]
        done = max(0, len(confirmed) - requests)
        for work in confirmed[:done]:
            work.done_tokens, work.remaining_s = work.new_tokens, 0.0
        left = confirmed[done:]
        done_tokens = sum(work.new_tokens - work.kept_tokens for work in left) - queue_tokens
        for work in left if done_tokens >= 0 else ():
            more = min(work.new_tokens - work.kept_tokens, done_tokens)
            work.done_tokens = work.kept_tokens + more
            done_tokens -= more
            work.remaining_s = self.estimate.work_s(
                work.new_tokens - work.done_tokens, work.prefix_tokens + work.done_tokens
            )
        self._unattributed_requests = max(0, requests - len(self._reservations))
        self._unattributed_s = 0.0
        if self._unattributed_requests:  # equal lengths are assumed, as a report has only sums
            ours = sum(work.prefix_tokens + work.new_tokens for work in self._ordered)
            each = max(0, queue_tokens - ours) / self._unattributed_requests
            self._unattributed_s = self._unattributed_requests * self.estimate.work_s(each, 0)

    def check(self) -> None:
        assert self._unattributed_s >= 0 and self._unattributed_requests >= 0
        for request_id, work in self._reservations.items():
            assert 0 <= work.kept_tokens <= work.done_tokens <= work.new_tokens, request_id
            assert work.remaining_s >= 0 and math.isfinite(work.remaining_s)
        assert sorted(map(id, self._ordered)) == sorted(map(id, self._reservations.values()))
        keys_s = [work.key_s for work in self._ordered[self._pinned :]]
        assert keys_s == sorted(keys_s), f"out of order: {keys_s}"
