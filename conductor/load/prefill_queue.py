"""The predicted work at one prefill worker: in front of a new request, and behind it.

Two sources know about it. The conductor knows at once, and in detail, what it routed itself (one
*charge* per request, with its cached prefix and its place in the queue); the worker's report knows
how much of it is left and what came from elsewhere, but late. They are joined so that nothing
counts twice and nothing goes below zero:

- A charge is *covered* by a report if it is at least report_lag_s older: the worker had it.
- Fewer requests there than covered charges: the first ones are done, the worker takes them in the
  order of their keys (queue_order.py). Fewer tokens than the rest of the covered charges hold: the
  first of them shrink.
- More requests there than all our charges: the others are *foreign* (from before a restart of the
  conductor, or from another front), with the tokens that ours cannot account for. Their keys are
  not known, so they go first.
- Charges that the report cannot know, and what it leaves open, stay as predicted. A worker counts
  a prompt that has not been looked up yet as wholly uncached, so "more tokens than predicted" says
  nothing.

The charge that is worked on is the *head*. With `preempts` a charge with a smaller key takes its
place between two chunks, and what the head has computed stays computed; without, a prompt that has
begun is finished first. Between reports only the head shrinks with time, down to zero and no
further: a request that takes longer than predicted does not eat the time of those behind it.

Not predicted: requests that arrive later and overtake this one. No more than queue_wait_s_max of
place is ever gained that way, and how much comes is not known here.

A finished or cancelled request takes its whole charge away, so when all have finished only foreign
work is left, and that fades by itself.

Not here: the memory of requests (cluster.py), what is done with the numbers (routing.py).
"""

from __future__ import annotations

import math
from bisect import insort_right
from dataclasses import dataclass

from conductor.estimates.estimates import PrefillEstimate


@dataclass(slots=True, eq=False)  # two charges may look alike
class PrefillCharge:
    key_s: float  # its place: the least goes first
    prefix_tokens: int
    new_tokens: int
    charged_at_s: float
    remaining_s: float
    done_tokens: int = 0
    kept_tokens: int = 0  # computed before others overtook it


class PrefillQueue:
    """Foreign work, then the head, then the other charges by their keys."""

    def __init__(self, estimate: PrefillEstimate, now_s: float, preempts: bool = False) -> None:
        self._estimate = estimate
        self._preempts = preempts
        self._charges: dict[str, PrefillCharge] = {}
        self._line: list[PrefillCharge] = []  # the head, then by key
        self._foreign_s = 0.0
        self._foreign_requests = 0
        self._as_of_s = now_s  # when foreign work was last known
        self._head_since_s = now_s  # when the head began to be worked on
        self.step_s = 0.0  # recent mean length of a step, which nothing interrupts

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._charges

    @property
    def requests(self) -> int:
        """Requests waiting or running there, ours and others'."""
        return len(self._charges) + self._foreign_requests

    def work_s(self, now_s: float) -> float:
        """Seconds of predicted work there, as calibrated."""
        return self.ahead_s(math.inf, now_s)

    def ahead_s(self, key_s: float, now_s: float) -> float:
        """Seconds until a request with this key, which arrives now, would begin, as calibrated."""
        wait_s = max(0.0, self._foreign_s - (now_s - self._as_of_s))
        if not self._line:
            return wait_s
        head_s = max(0.0, self._line[0].remaining_s - self._head_elapsed_s(now_s))
        if self._is_ahead_of_head(key_s):
            return wait_s + min(head_s, self.step_s / 2)
        wait_s += head_s
        for charge in self._line[1:]:
            if charge.key_s <= key_s:
                wait_s += charge.remaining_s
        return wait_s

    def behind(self, key_s: float) -> int:
        """How many of our requests would begin or go on later because of one with this key."""
        overtaken = sum(charge.key_s > key_s for charge in self._line[1:])
        return overtaken + self._is_ahead_of_head(key_s)

    def _is_ahead_of_head(self, key_s: float) -> bool:
        return self._preempts and bool(self._line) and key_s < self._line[0].key_s

    # The same as columns need it (prefill_pool.py): moments instead of spans of time.

    def moments(self) -> tuple[float, float, float, float]:
        """When the foreign work will be done; when that and the head will be, if nothing else is
        done first; which keys go before the head (smaller ones); and none of ours is above."""
        foreign_until_s = self._as_of_s + self._foreign_s
        if not self._line:
            return foreign_until_s, foreign_until_s, -math.inf, -math.inf
        head = self._line[0]
        busy_until_s = max(self._head_since_s, foreign_until_s) + head.remaining_s
        head_key_s = head.key_s if self._preempts else -math.inf
        return foreign_until_s, busy_until_s, head_key_s, self._line[-1].key_s

    def places(self) -> list[tuple[float, float]]:
        """(key, seconds) of each charge behind the head."""
        return [(charge.key_s, charge.remaining_s) for charge in self._line[1:]]

    def _settle(self, now_s: float) -> None:
        """Write down the time that has passed, before something else changes."""
        if self._line:
            head = self._line[0]
            head.remaining_s = max(0.0, head.remaining_s - self._head_elapsed_s(now_s))
        self._foreign_s = max(0.0, self._foreign_s - (now_s - self._as_of_s))
        self._as_of_s = self._head_since_s = now_s

    def _head_elapsed_s(self, now_s: float) -> float:
        """How long the head has been worked on: since foreign work ended."""
        began_s = max(self._head_since_s, self._as_of_s + self._foreign_s)
        return max(0.0, now_s - began_s)

    def charge(
        self,
        request_id: str,
        new_tokens: int,
        prefix_tokens: int,
        now_s: float,
        key_s: float | None = None,
    ) -> None:
        """Routed here. `key_s`: its place (queue_order.py); first come, first served without."""
        assert request_id not in self._charges, f"{request_id} is charged already"
        assert new_tokens > 0 and prefix_tokens >= 0, (new_tokens, prefix_tokens)
        seconds = self._estimate.seconds(new_tokens, prefix_tokens)
        place_s = now_s if key_s is None else key_s
        charge = PrefillCharge(place_s, prefix_tokens, new_tokens, now_s, seconds)
        self._charges[request_id] = charge
        if not self._line:
            self._head_since_s = now_s
            self._line.append(charge)
        elif self._is_ahead_of_head(place_s):
            self._settle(now_s)
            self._keep_what_the_head_computed()
            self._line.insert(0, charge)
        else:
            insort_right(self._line, charge, lo=self._pinned, key=lambda other: other.key_s)

    @property
    def _pinned(self) -> int:
        """The first of the line that no key overtakes any more."""
        return 0 if self._preempts else 1

    def _keep_what_the_head_computed(self) -> None:
        head = self._line[0]
        whole_s = self._estimate.seconds(head.new_tokens, head.prefix_tokens)
        if whole_s > 0:
            share = max(0.0, 1.0 - head.remaining_s / whole_s)
            head.done_tokens = head.kept_tokens = int(share * head.new_tokens)

    def drop(self, request_id: str, now_s: float) -> bool:
        """Finished or cancelled; False when it was not charged here."""
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return False
        if charge is self._line[0]:
            self._head_since_s = now_s
        self._line.remove(charge)
        return True

    def on_report(
        self, queue_tokens: int, requests: int, now_s: float, report_lag_s: float
    ) -> None:
        """Lay the worker's own count over the charges that it must know.

        `requests`: waiting or running there; `queue_tokens`: what they still have to compute.
        """
        self._settle(now_s)
        covered = [c for c in self._line if c.charged_at_s <= now_s - report_lag_s]
        done = max(0, len(covered) - requests)
        for charge in covered[:done]:
            charge.done_tokens, charge.remaining_s = charge.new_tokens, 0.0
        left = covered[done:]
        done_tokens = sum(charge.new_tokens - charge.kept_tokens for charge in left) - queue_tokens
        for charge in left if done_tokens >= 0 else ():
            more = min(charge.new_tokens - charge.kept_tokens, done_tokens)
            charge.done_tokens = charge.kept_tokens + more
            done_tokens -= more
            charge.remaining_s = self._remaining_s(charge)
        self._foreign_requests = max(0, requests - len(self._charges))
        self._foreign_s = 0.0
        if self._foreign_requests:  # equal lengths assumed: a report does not tell them apart
            ours = sum(charge.prefix_tokens + charge.new_tokens for charge in self._line)
            each = max(0, queue_tokens - ours) / self._foreign_requests
            self._foreign_s = self._foreign_requests * self._estimate.seconds(each, 0)

    def _remaining_s(self, charge: PrefillCharge) -> float:
        return self._estimate.seconds(
            charge.new_tokens - charge.done_tokens, charge.prefix_tokens + charge.done_tokens
        )

    def check(self) -> None:
        """Prove the invariants."""
        assert self._foreign_s >= 0 and self._foreign_requests >= 0
        for request_id, charge in self._charges.items():
            assert 0 <= charge.kept_tokens <= charge.done_tokens <= charge.new_tokens, request_id
            assert charge.remaining_s >= 0 and math.isfinite(charge.remaining_s)
        assert sorted(map(id, self._line)) == sorted(map(id, self._charges.values()))
        places = [charge.key_s for charge in self._line[self._pinned :]]
        assert places == sorted(places), f"out of order: {places}"
