"""The predicted work in front of a new request at one prefill worker.

Two sources know about it. The conductor knows at once, and in detail, what it routed itself (one
*charge* per request, with its cached prefix); the worker's report knows how much of it is left and
what came from elsewhere, but late. They are joined so that nothing counts twice and nothing goes
below zero:

- A charge is *covered* by a report if it is at least report_lag_s older: the worker had it.
- Fewer requests there than covered charges: the first ones are done, the worker is first come
  first served. Fewer tokens than the rest of the covered charges hold: the first of them shrink.
- More requests there than all our charges: the others are *foreign* (from before a restart of the
  conductor, or from another front), with the tokens that ours cannot account for.
- Charges that the report cannot know, and what it leaves open, stay as predicted. A worker counts
  a prompt that has not been looked up yet as wholly uncached, so "more tokens than predicted" says
  nothing.

Between reports only the work at the head shrinks with time, down to zero and no further: a request
that takes longer than predicted does not eat the time of those behind it.

A finished or cancelled request takes its whole charge away, so when all have finished only foreign
work is left, and that fades by itself.

Not here: the memory of requests (cluster.py), what is done with the number (routing.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from conductor.estimates import PrefillEstimate


@dataclass(slots=True)
class PrefillCharge:
    prefix_tokens: int
    new_tokens: int
    charged_at_s: float
    done_tokens: int
    remaining_s: float
    is_started: bool = False


class PrefillQueue:
    """First come, first served: foreign work, then the charges in their order."""

    def __init__(self, estimate: PrefillEstimate, now_s: float) -> None:
        self._estimate = estimate
        self._charges: dict[str, PrefillCharge] = {}
        self._foreign_s = 0.0
        self._foreign_requests = 0
        self._as_of_s = now_s  # when foreign work was last known
        self._head_since_s = now_s  # when the first charge began to be worked on
        self._waiting_s = 0.0  # all charges but the first

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._charges

    @property
    def requests(self) -> int:
        """Requests waiting or running there, ours and others'."""
        return len(self._charges) + self._foreign_requests

    def work_s(self, now_s: float) -> float:
        """Seconds until a request that arrives now would begin, as calibrated."""
        foreign_s = max(0.0, self._foreign_s - (now_s - self._as_of_s))
        if not self._charges:
            return foreign_s
        head = next(iter(self._charges.values()))
        head_s = max(0.0, head.remaining_s - self._head_elapsed_s(now_s))
        return foreign_s + head_s + self._waiting_s

    def _settle(self, now_s: float) -> None:
        """Write down the time that has passed, before something else changes."""
        head = next(iter(self._charges.values()), None)
        if head is not None:
            head.remaining_s = max(0.0, head.remaining_s - self._head_elapsed_s(now_s))
        self._foreign_s = max(0.0, self._foreign_s - (now_s - self._as_of_s))
        self._as_of_s = self._head_since_s = now_s

    def _head_elapsed_s(self, now_s: float) -> float:
        """How long the first charge has been worked on: since foreign work ended."""
        began_s = max(self._head_since_s, self._as_of_s + self._foreign_s)
        return max(0.0, now_s - began_s)

    def charge(self, request_id: str, new_tokens: int, prefix_tokens: int, now_s: float) -> None:
        assert request_id not in self._charges, f"{request_id} is charged already"
        assert new_tokens > 0 and prefix_tokens >= 0, (new_tokens, prefix_tokens)
        if not self._charges:
            self._head_since_s = now_s
        seconds = self._estimate.seconds(new_tokens, prefix_tokens)
        self._charges[request_id] = PrefillCharge(prefix_tokens, new_tokens, now_s, 0, seconds)
        self._recount()

    def start(self, request_id: str, cached_tokens: int, now_s: float) -> None:
        """The worker began: what it really found cached replaces what was predicted."""
        charge = self._charges.get(request_id)
        if charge is None or charge.is_started:
            return
        self._settle(now_s)
        prompt_tokens = charge.prefix_tokens + charge.new_tokens
        charge.prefix_tokens = min(max(cached_tokens, 0), prompt_tokens - 1)
        charge.new_tokens = prompt_tokens - charge.prefix_tokens
        charge.done_tokens, charge.is_started = 0, True
        charge.remaining_s = self._remaining_s(charge)
        head = next(iter(self._charges.values()))
        if not head.is_started:  # overtaken: it still fetches, and has computed nothing
            head.remaining_s = self._remaining_s(head)
            by_start = sorted(self._charges.items(), key=lambda item: not item[1].is_started)
            self._charges = dict(by_start)
        self._recount()

    def drop(self, request_id: str, now_s: float) -> bool:
        """Finished or cancelled; False when it was not charged here."""
        charge = self._charges.get(request_id)
        if charge is None:
            return False
        if charge is next(iter(self._charges.values())):
            self._head_since_s = now_s
        del self._charges[request_id]
        self._recount()
        return True

    def on_report(
        self, queue_tokens: int, requests: int, now_s: float, report_lag_s: float
    ) -> None:
        """Lay the worker's own count over the charges that it must know.

        `requests`: waiting or running there; `queue_tokens`: what they still have to compute.
        """
        self._settle(now_s)
        covered = [c for c in self._charges.values() if c.charged_at_s <= now_s - report_lag_s]
        done = max(0, len(covered) - requests)
        for charge in covered[:done]:
            charge.done_tokens, charge.remaining_s = charge.new_tokens, 0.0
        done_tokens = sum(charge.new_tokens for charge in covered[done:]) - queue_tokens
        for charge in covered[done:] if done_tokens >= 0 else ():
            charge.done_tokens = min(charge.new_tokens, done_tokens)
            done_tokens -= charge.done_tokens
            charge.remaining_s = self._remaining_s(charge)
        self._foreign_requests = max(0, requests - len(self._charges))
        self._foreign_s = 0.0
        if self._foreign_requests:  # equal lengths assumed: a report does not tell them apart
            ours = sum(
                charge.prefix_tokens + charge.new_tokens for charge in self._charges.values()
            )
            each = max(0, queue_tokens - ours) / self._foreign_requests
            self._foreign_s = self._foreign_requests * self._estimate.seconds(each, 0)
        self._recount()

    def _remaining_s(self, charge: PrefillCharge) -> float:
        return self._estimate.seconds(
            charge.new_tokens - charge.done_tokens, charge.prefix_tokens + charge.done_tokens
        )

    def _recount(self) -> None:
        charges = iter(self._charges.values())
        next(charges, None)
        self._waiting_s = math.fsum(charge.remaining_s for charge in charges)

    def check(self) -> None:
        """Prove the invariants."""
        assert self._foreign_s >= 0 and self._foreign_requests >= 0
        for request_id, charge in self._charges.items():
            assert 0 <= charge.done_tokens <= charge.new_tokens, (request_id, charge)
            assert charge.remaining_s >= 0 and math.isfinite(charge.remaining_s)
        waiting = list(self._charges.values())[1:]
        assert math.isclose(self._waiting_s, math.fsum(c.remaining_s for c in waiting))
        if not self._charges:
            assert self._waiting_s == 0.0, f"{self._waiting_s} s charged to nobody"
