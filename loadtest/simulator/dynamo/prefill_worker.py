"""A prefill worker of Dynamo's engine: passes of at most 8,192 new tokens.

A pass takes prompts in the order of their keys until its tokens are spent; the last one gets what
is left and continues later. A waiting prompt that does not fit blocks those that wait behind it:
it needs its blocks less those of its cached prefix that somebody holds. Its first chunk pins what
is cached. Blocks are taken chunk by chunk, and can be hit from then on, within the same pass too.
A finished prompt keeps its blocks until the decode worker has taken it over.

First come, first served, this is Dynamo's engine: the prompt that is partly computed came first.
With other keys a short prompt overtakes a long one between two chunks, as in our own workers
(backends/engine/batching.py); so there may be several partly computed prompts, and the blocks that
they have yet to take count as taken. With `overhead_tokens` a pass may end before its tokens are
spent, so that short prompts need not wait for others to be computed
(conductor/load/step_sharing.py).

Not here: time (replay.py), the order of the queue (the job's order_key_s).
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from conductor.load.step_sharing import ALWAYS, shares_step
from loadtest.simulator.dynamo.blocks import PARTIAL, BlockPool, Watcher
from loadtest.simulator.dynamo.job import Job
from loadtest.simulator.dynamo.timing import (
    BLOCK_TOKENS,
    PASS_TOKENS_MAX,
    blocks_of,
    prefill_pass_s,
)

Place = tuple[float, int, Job]  # key, how many came before: the least is next


class PrefillWorker:
    """`overhead_tokens`: when prompts share a pass; by default a pass is filled, as Dynamo does."""

    def __init__(
        self, number: int, blocks: int, watcher: Watcher | None = None,
        overhead_tokens: float = ALWAYS,
    ) -> None:  # fmt: skip
        self.number = number
        self.overhead_tokens = overhead_tokens
        self.pool = BlockPool(blocks, watcher)
        self._waiting: list[Place] = []  # both are heaps
        self._partial: list[Place] = []
        self._reserved = 0  # blocks that partial prompts will still take
        self._arrivals = 0
        self._pass: list[Job] = []  # prompts that end with the running pass
        self.pass_tokens = 0
        self.is_busy = False

    @property
    def requests(self) -> int:
        """Waiting or being computed."""
        return len(self._waiting) + len(self._partial) + len(self._pass)

    @property
    def queue_tokens(self) -> int:
        """Still to compute; what was not looked up yet counts as uncached."""
        waiting = sum(job.prompt_tokens for _, _, job in self._waiting)
        partial = sum(job.prompt_tokens - job.computed_tokens for _, _, job in self._partial)
        return waiting + partial + self.pass_tokens

    def add(self, job: Job) -> None:
        """Queue it: the least key first, of equal ones the one that came first."""
        self._arrivals += 1
        heappush(self._waiting, (job.order_key_s, self._arrivals, job))

    def start_pass(self, now_s: float) -> tuple[float, list[Job]]:
        """Seconds of the next pass, 0 when there is nothing to compute; who was first scheduled."""
        assert not self.is_busy
        budget, begun, cut = PASS_TOKENS_MAX, list[Job](), list[Place]()
        is_blocked, sharing, requests = False, 0, self.requests
        while budget and (place := self._next(is_blocked)):
            job = place[2]
            if not self._is_shared(job, budget, sharing, requests - sharing):
                break
            if math.isnan(job.started_s):
                if not self._admit(job):
                    is_blocked = True
                    continue
                heappop(self._waiting)
                job.started_s = now_s
                begun.append(job)
            else:
                heappop(self._partial)
            budget -= self._compute(job, budget)
            sharing += 1
            if job.computed_tokens < job.prompt_tokens:
                cut.append(place)
        for place in cut:
            heappush(self._partial, place)
        self.pass_tokens = PASS_TOKENS_MAX - budget
        self.is_busy = self.pass_tokens > 0
        return prefill_pass_s(self.pass_tokens), begun

    def _is_shared(self, job: Job, budget: int, sharing: int, behind: int) -> bool:
        """Whether this prompt is computed in the same pass as those before it."""
        if not sharing or self.overhead_tokens == ALWAYS:
            return True
        done = job.computed_tokens
        if math.isnan(job.started_s):
            done = len(self.pool.hits(job.hittable)) * BLOCK_TOKENS
        tokens = job.prompt_tokens - done
        whole = tokens if tokens <= budget else PASS_TOKENS_MAX
        return shares_step(sharing, behind, whole, self.overhead_tokens)

    def _next(self, is_blocked: bool) -> Place | None:
        """The least key of those that may be computed now."""
        waiting = None if is_blocked or not self._waiting else self._waiting[0]
        partial = self._partial[0] if self._partial else None
        if waiting is None or (partial is not None and partial < waiting):
            return partial
        return waiting

    def _admit(self, job: Job) -> bool:
        """Pin what is cached and reserve the rest, if it fits."""
        hits = self.pool.hits(job.hittable)
        wanted = blocks_of(job.prompt_tokens)
        if wanted - self.pool.held(hits) > self.pool.room - self._reserved:
            return False
        self.pool.hold(hits)
        self._reserved += wanted - len(hits)
        job.prefill_blocks = hits
        job.cached_tokens = job.computed_tokens = len(hits) * BLOCK_TOKENS
        return True

    def _compute(self, job: Job, budget: int) -> int:
        """Give the prompt at most `budget` tokens of this pass, and their blocks."""
        tokens = min(budget, job.prompt_tokens - job.computed_tokens)
        job.computed_tokens += tokens
        # A block that this chunk fills in part is taken now and completed by a later chunk.
        blocks, full = job.prefill_blocks, len(job.keys)
        for place in range(len(blocks), blocks_of(job.computed_tokens)):
            blocks.append(self.pool.take(job.keys[place] if place < full else PARTIAL))
            self._reserved -= 1
        if job.computed_tokens == job.prompt_tokens:
            self._pass.append(job)
        return tokens

    def end_pass(self) -> list[Job]:
        """The prompts that are computed now."""
        done, self._pass = self._pass, []
        self.pass_tokens, self.is_busy = 0, False
        return done

    def release(self, job: Job) -> None:
        """The decode worker has its own copy of the KV."""
        self.pool.release(job.prefill_blocks)
        job.prefill_blocks = []
