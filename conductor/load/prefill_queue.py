"""The predicted work at one prefill worker: in front of a new request, and behind it.

Two sources know about it. The conductor knows at once, and in detail, what it routed itself (one
*reservation* per request, with its cached prefix and its position in the queue); the worker's
report knows how much of it is left and what came from elsewhere, but late. They are joined so that
nothing counts twice and nothing goes below zero:

- A reservation is *confirmed* by a report if it is at least report_lag_s older: the worker had it.
- Fewer requests there than confirmed reservations: the first ones are done, the worker takes them
  in the order of their keys (queue_order.py). Fewer tokens than the rest of the confirmed ones
  hold: the first of them shrink.
- More requests there than all our reservations: the others are *unattributed* (from before a
  restart of the conductor, or from another frontend), with the tokens that ours cannot account for.
  Their keys are not known, so they go first.
- Reservations that the report cannot know, and what it leaves open, stay as predicted. A worker
  counts a prompt that has not been looked up yet as wholly uncached, so "more tokens than
  predicted" says nothing.

The reserved work that is being computed is the *head*. With `preempts` work with a smaller key
takes its position between two chunks, and what the head has computed stays computed; without, a
prompt that has begun is finished first. Between reports only the head shrinks with time, down to
zero and no further: a request that takes longer than predicted does not eat the time of those
behind it.

The work of a pipeline group is that of its slowest stage: while the last chunk of a prompt goes
through the other stages, the next prompt has begun (estimates/pipeline.py).

Not predicted: requests that arrive later and overtake this one. No more than queue_wait_s_max of
waiting is ever gained that way, and how much comes is not known here.

A finished or cancelled request takes its whole reservation away, so when all have finished only
unattributed work is left, and that fades by itself.

Not here: the memory of requests (cluster.py), what is done with the numbers (routing.py).
"""

from __future__ import annotations

import math
from bisect import insort_right
from dataclasses import dataclass

from conductor.estimates.pipeline import PipelineEstimate


@dataclass(slots=True, eq=False)  # two reservations may look alike
class PrefillReservation:
    key_s: float  # its position in the queue: the least goes first
    prefix_tokens: int
    new_tokens: int
    reserved_at_s: float
    remaining_s: float
    done_tokens: int = 0
    kept_tokens: int = 0  # computed before others overtook it


class PrefillQueue:
    """Unattributed work, then the head, then the other reservations by their keys."""

    def __init__(self, estimate: PipelineEstimate, now_s: float, preempts: bool = False) -> None:
        self._estimate = estimate
        self._preempts = preempts
        self._reservations: dict[str, PrefillReservation] = {}
        self._line: list[PrefillReservation] = []  # the head, then by key
        self._unattributed_s = 0.0
        self._unattributed_requests = 0
        self._as_of_s = now_s  # when unattributed work was last known
        self._head_since_s = now_s  # when the head began to be worked on
        self.step_s = 0.0  # recent mean length of a step, which nothing interrupts

    def goes_through(self, estimate: PipelineEstimate) -> None:
        """It has other stages from now on; what is reserved stays as it was predicted."""
        self._estimate = estimate

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reservations

    @property
    def requests(self) -> int:
        """Requests waiting or running there, ours and others'."""
        return len(self._reservations) + self._unattributed_requests

    def work_s(self, now_s: float) -> float:
        """Seconds of predicted work there, at the calibrated speed."""
        return self.ahead_s(math.inf, now_s)

    def ahead_s(self, key_s: float, now_s: float) -> float:
        """Seconds until a request with this key, which arrives now, would begin, as calibrated."""
        wait_s = max(0.0, self._unattributed_s - (now_s - self._as_of_s))
        if not self._line:
            return wait_s
        head_s = max(0.0, self._line[0].remaining_s - self._head_elapsed_s(now_s))
        if self._is_ahead_of_head(key_s):
            return wait_s + min(head_s, self.step_s / 2)
        wait_s += head_s
        for work in self._line[1:]:
            if work.key_s <= key_s:
                wait_s += work.remaining_s
        return wait_s

    def behind(self, key_s: float) -> int:
        """How many of our requests would begin or go on later because of one with this key."""
        overtaken = sum(work.key_s > key_s for work in self._line[1:])
        return overtaken + self._is_ahead_of_head(key_s)

    def _is_ahead_of_head(self, key_s: float) -> bool:
        return self._preempts and bool(self._line) and key_s < self._line[0].key_s

    # The columns of prefill_pool.py hold moments, which stay true, instead of spans of time.

    def moments(self) -> tuple[float, float, float, float]:
        """When the unattributed work will be done; when that and the head will be, if nothing else
        is done first; which keys go before the head (smaller ones); and none of ours is above."""
        unattributed_until_s = self._as_of_s + self._unattributed_s
        if not self._line:
            return unattributed_until_s, unattributed_until_s, -math.inf, -math.inf
        head = self._line[0]
        busy_until_s = max(self._head_since_s, unattributed_until_s) + head.remaining_s
        head_key_s = head.key_s if self._preempts else -math.inf
        return unattributed_until_s, busy_until_s, head_key_s, self._line[-1].key_s

    def positions(self) -> list[tuple[float, float]]:
        """(key, seconds) of each reservation behind the head."""
        return [(work.key_s, work.remaining_s) for work in self._line[1:]]

    def _settle(self, now_s: float) -> None:
        """Write down the time that has passed, before something else changes."""
        if self._line:
            head = self._line[0]
            head.remaining_s = max(0.0, head.remaining_s - self._head_elapsed_s(now_s))
        self._unattributed_s = max(0.0, self._unattributed_s - (now_s - self._as_of_s))
        self._as_of_s = self._head_since_s = now_s

    def _head_elapsed_s(self, now_s: float) -> float:
        """How long the head has been worked on: since unattributed work ended."""
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
        """Routed here. `key_s`: from queue_order.py; without, first come, first served."""
        assert request_id not in self._reservations, f"{request_id} is reserved already"
        assert new_tokens > 0 and prefix_tokens >= 0, (new_tokens, prefix_tokens)
        seconds = self._estimate.work_s(new_tokens, prefix_tokens)
        order_key_s = now_s if key_s is None else key_s
        work = PrefillReservation(order_key_s, prefix_tokens, new_tokens, now_s, seconds)
        self._reservations[request_id] = work
        if not self._line:
            self._head_since_s = now_s
            self._line.append(work)
        elif self._is_ahead_of_head(order_key_s):
            self._settle(now_s)
            self._keep_what_the_head_computed()
            self._line.insert(0, work)
        else:
            insort_right(self._line, work, lo=self._pinned, key=lambda other: other.key_s)

    @property
    def _pinned(self) -> int:
        """The first of the line that no key overtakes any more."""
        return 0 if self._preempts else 1

    def _keep_what_the_head_computed(self) -> None:
        head = self._line[0]
        whole_s = self._estimate.work_s(head.new_tokens, head.prefix_tokens)
        if whole_s > 0:
            share = max(0.0, 1.0 - head.remaining_s / whole_s)
            head.done_tokens = head.kept_tokens = int(share * head.new_tokens)

    def drop(self, request_id: str, now_s: float) -> bool:
        """Finished or cancelled; False when it was not reserved here."""
        work = self._reservations.pop(request_id, None)
        if work is None:
            return False
        if work is self._line[0]:
            # The next one began when the group's slowest stage had done its part of this one.
            over_s = self._head_elapsed_s(now_s) - work.remaining_s
            filled_s = self._estimate.fill_s(work.new_tokens, work.prefix_tokens)
            self._head_since_s = now_s - min(filled_s, max(0.0, over_s))
        self._line.remove(work)
        return True

    def attribute(self, now_s: float) -> None:
        """The last report had counted, without knowing whose it is, what was now reserved."""
        if self._unattributed_requests:
            self._settle(now_s)
            self._unattributed_s *= 1.0 - 1.0 / self._unattributed_requests
            self._unattributed_requests -= 1

    def disown(self, request_id: str, now_s: float) -> None:
        """Nobody will say when this one ends: what is left of it becomes unattributed work."""
        self._settle(now_s)
        work = self._reservations.get(request_id)
        if work is not None and self.drop(request_id, now_s) and work.done_tokens < work.new_tokens:
            self._unattributed_requests += 1
            self._unattributed_s += work.remaining_s

    def on_report(
        self, queue_tokens: int, requests: int, now_s: float, report_lag_s: float
    ) -> None:
        """Lay the worker's own count over the reservations that it must know.

        `requests`: waiting or running there; `queue_tokens`: what they still have to compute.
        """
        self._settle(now_s)
        confirmed = [c for c in self._line if c.reserved_at_s <= now_s - report_lag_s]
        done = max(0, len(confirmed) - requests)
        for work in confirmed[:done]:
            work.done_tokens, work.remaining_s = work.new_tokens, 0.0
        left = confirmed[done:]
        done_tokens = sum(work.new_tokens - work.kept_tokens for work in left) - queue_tokens
        for work in left if done_tokens >= 0 else ():
            more = min(work.new_tokens - work.kept_tokens, done_tokens)
            work.done_tokens = work.kept_tokens + more
            done_tokens -= more
            work.remaining_s = self._remaining_s(work)
        self._unattributed_requests = max(0, requests - len(self._reservations))
        self._unattributed_s = 0.0
        if self._unattributed_requests:  # equal lengths assumed: a report does not tell them apart
            ours = sum(work.prefix_tokens + work.new_tokens for work in self._line)
            each = max(0, queue_tokens - ours) / self._unattributed_requests
            self._unattributed_s = self._unattributed_requests * self._estimate.work_s(each, 0)

    def _remaining_s(self, work: PrefillReservation) -> float:
        return self._estimate.work_s(
            work.new_tokens - work.done_tokens,
            work.prefix_tokens + work.done_tokens,
        )

    def check(self) -> None:
        """Prove the invariants."""
        assert self._unattributed_s >= 0 and self._unattributed_requests >= 0
        for request_id, work in self._reservations.items():
            assert 0 <= work.kept_tokens <= work.done_tokens <= work.new_tokens, request_id
            assert work.remaining_s >= 0 and math.isfinite(work.remaining_s)
        assert sorted(map(id, self._line)) == sorted(map(id, self._reservations.values()))
        keys_s = [work.key_s for work in self._line[self._pinned :]]
        assert keys_s == sorted(keys_s), f"out of order: {keys_s}"
