"""One request of a simulated crowd, with the frontend's own state machine.

It does what a real frontend's mailbox does (backends/frontend/live_request.py), on the virtual
clock. `post` handles events one after the other; the machine returns actions, and a
`LifecycleCarrier` carries them out. Tokens arrive in batches, when a worker ends, is lost or is
frozen, instead of one message per step; the machine handles both.

Not here: the state machine (backends/frontend/lifecycle), workers (followed_fleet.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from backends.errors import Overloaded, ServingError
from backends.frontend.lifecycle import events
from backends.frontend.lifecycle.attempts import Attempts
from backends.frontend.lifecycle.events import LifecycleAction, LifecycleEvent
from backends.frontend.lifecycle.machine import State, step
from backends.text.text_stream import OutputDelta
from conductor.messages import Request
from loadtest.simulator.cluster.job import Offered, SimulatedJob

WorkerKey = tuple[str, str]
LENGTH = "length"  # finish reason


class FollowedRequest:
    def __init__(
        self,
        offered: Offered,
        output_tokens_max: int,
        attempts: Attempts,
        carry_out: Callable[[FollowedRequest, LifecycleAction], None],
        now_s: float,
    ) -> None:
        """`carry_out`: carries out the actions that concern other objects than the request."""
        self.number = offered.number
        self.arrived_s = now_s
        self.state = State()
        self.attempts: dict[int, SimulatedJob] = {}
        self.losses: Counter[str] = Counter()
        self.ended_s: float | None = None
        self.error: Exception | None = None
        self.first_token_s: float | None = None
        self._carry_out, self._offered, self._tokens_max = carry_out, offered, output_tokens_max
        # decoded tokens of each attempt that messages delivered
        self._brought: Counter[int] = Counter()
        self._events: deque[LifecycleEvent] = deque()
        self._is_owned = False
        self.post(events.Understood(attempts, False, now_s))

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    @property
    def kind(self) -> str:
        """ "finished", or the kind of its error."""
        if self.error is None:
            return "finished"
        if isinstance(self.error, Overloaded):
            return f"rejected {self.error.kind}"
        return type(self.error).__name__ if isinstance(self.error, ServingError) else "untyped"

    def post(self, event: LifecycleEvent) -> None:
        self._events.append(event)
        if self._is_owned:
            return
        self._is_owned = True
        while self._events:
            self.state, actions = step(self.state, self._events.popleft())
            for action in actions:
                self._carry_out(self, action)
        self._is_owned = False

    def ended(self, error: Exception | None, now_s: float) -> None:
        assert not self.is_over, f"request {self.number} ended twice"
        self.ended_s, self.error = now_s, error

    def new_attempt(self, action: events.Decide, now_s: float) -> SimulatedJob:
        """The remaining part of the request, as a job of its own."""
        sent, offered = self.state.sent_tokens, self._offered
        request = Request(
            request_id=f"r{self.number}-{action.attempt}",
            prompt_tokens=offered.prompt_tokens + sent,
            block_keys=offered.keys,
            output_tokens_max=self._tokens_max - sent,
            excluded_workers=action.avoided,
            is_resumed=action.is_resumed,
        )
        left = offered.output_tokens - sent
        assert left > 0, f"request {self.number} has all its tokens and continues"
        job = SimulatedJob(self.number, request, left, now_s, attempts=action.attempt)
        self.attempts[action.attempt] = job
        return job

    # -- reports of workers, as events

    def prefilled(self, job: SimulatedJob, now_s: float) -> None:
        self.first_token_s = self.first_token_s or now_s
        reason = LENGTH if job.output_tokens == 1 else ""
        first = events.FirstText(_tokens(1), reason, job.cached_tokens)
        self.post(events.PrefillReplied(job.attempts, first, job.compute_s, {}, now_s))

    def decoded(self, job: SimulatedJob, worker: WorkerKey, count: int, now_s: float) -> None:
        """Read the new ones of the `count` tokens that were generated there so far."""
        before = self._brought[job.attempts]
        if count > before:
            self._brought[job.attempts] = count
            updates = [(before, _tokens(count - before))]
            self.post(events.TokensArrived(job.attempts, worker[1], updates, now_s, 0.0))

    def replied(self, job: SimulatedJob, worker: WorkerKey, now_s: float) -> None:
        self.decoded(job, worker, job.output_tokens - 1, now_s)
        self.post(
            events.DecodeReplied(job.attempts, job.output_tokens - 1, _tokens(0), LENGTH, {}, now_s)
        )

    def failed(self, job: SimulatedJob, error: Exception, now_s: float) -> None:
        self.post(events.CallFailed(job.attempts, error, now_s))

    def summed_up(self) -> SimulatedJob:
        """All attempts as one job, for outcome_of (loadtest/simulator/cluster/outcome.py)."""
        assert self.is_over
        jobs = list(self.attempts.values())
        last = jobs[-1]
        request = replace(last.request, prompt_tokens=self._offered.prompt_tokens)
        found = replace(
            last,
            request=request,
            output_tokens=self._offered.output_tokens,
            arrived_s=self.arrived_s,
            attempts=len(jobs),
            own_compute_s=sum(job.own_compute_s for job in jobs),
            lost_compute_s=sum(job.own_compute_s for job in jobs[:-1]),
        )
        found.refused = "" if self.error is None else self.kind
        found.finished_s = self.ended_s if self.error is None else None
        found.first_token_s = self.first_token_s
        return found


def _tokens(count: int) -> OutputDelta:
    return OutputDelta((0,) * count, "")
