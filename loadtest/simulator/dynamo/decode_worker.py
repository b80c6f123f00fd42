"""A decode worker of Dynamo's engine: one batch, a step at a time, many steps at once.

At each boundary between two steps it takes over pending prompts, first come first served, while
there are fewer than 256 sequences and all blocks of the next prompt fit (what it holds of the
prompt's prefix already counts). Taking over is free. Each step then gives every sequence a token,
the first one included. A sequence takes one more block for each 512 tokens, before the step that
computes the first of them.

A sequence that finds no block to grow into preempts the one that joined the batch last, itself if
need be (lifo, as Dynamo's mocker has it by default), until there is one. What is preempted loses
its blocks to the cache, keeps the tokens that it has generated, and waits before all others; nobody
joins in that step. It comes back when all its blocks fit, less those that somebody holds, and
computes again what is no more in the cache, 8,192 tokens in one step with the batch: this takes no
time of its own in Dynamo's model, but sequences behind it in the batch get no token while it uses
up the step's tokens. While prompts are pending it stays out; while it waits, those that were taken
over wait behind it with their blocks. Both as in `lib/mocker/src/scheduler/vllm/core.rs` of Dynamo.

Between two changes nothing but the context grows, so the worker plans a *span*: all steps until
the first sequence ends or no block is left. A prompt that arrives cuts it at the next boundary.

Not here: time (replay.py), how long steps take (timing.py).
"""

from __future__ import annotations

import itertools
import math
from collections import deque

from loadtest.simulator.dynamo.blocks import PARTIAL, BlockPool
from loadtest.simulator.dynamo.job import Job
from loadtest.simulator.dynamo.timing import (
    BLOCK_TOKENS,
    PASS_TOKENS_MAX,
    SEQUENCES_MAX,
    Steps,
    blocks_of,
)

PLACES_MAX = 2**20  # blocks of one sequence


class OutOfBlocks(Exception):
    """Nothing can run and nothing can end: here Dynamo's own replay ends with an error as well."""


class DecodeWorker:
    def __init__(self, number: int, blocks: int) -> None:
        self.number = number
        self.pool = BlockPool(blocks)
        self.room_tokens = blocks * BLOCK_TOKENS
        self.pending: deque[Job] = deque()  # prompts that are still where they were computed
        self.waiting: deque[Job] = deque()  # to join the batch; first those that were preempted
        self.batch: dict[Job, None] = {}  # in order of joining
        self.context_tokens = 0  # KV of the sequences that decode, at the start of the span
        self._ready: list[Job] = []  # sequences that get a token in each step of the span
        self._numbers = itertools.count()
        self._steps: Steps | None = None
        self._planned = 0  # steps of the span
        self._since_s = 0.0
        self.span = 0  # number of the plan: an event of an older plan means nothing

    @property
    def is_idle(self) -> bool:
        return self._steps is None

    @property
    def step_s(self) -> float:
        """The first step of the span; 0 when idle."""
        return 0.0 if self._steps is None else self._steps.first_s

    def plan(self, now_s: float) -> tuple[list[Job], float | None]:
        """At a boundary: take over what fits, then plan. Who came, and when the span ends."""
        came: list[Job] = []
        self.span += 1
        while True:
            came += self._take_over(now_s)
            budget, is_tight = self._schedule_batch()
            if not is_tight:
                self._admit(budget)
            # A step that only computes again what was lost takes no time: on to the next one.
            self._ready = [job for job in self.batch if job.kv_tokens == job.tokens]
            if self._ready or not self.batch:
                break
        if not self.batch:
            if self.waiting or self.pending:
                raise OutOfBlocks(self._stuck())
            self._steps = None
            return came, None
        self.context_tokens = sum(job.tokens for job in self._ready)
        steps = Steps.of(len(self._ready), self.context_tokens, self.room_tokens)
        for job in self._ready:
            if math.isnan(job.first_token_s):
                job.first_token_s = now_s + steps.first_s
        is_steady = not is_tight and len(self._ready) == len(self.batch)
        self._steps, self._since_s = steps, now_s
        self._planned = self._steps_that_fit() if is_steady else 1
        return came, now_s + steps.seconds(self._planned)

    def cut(self, now_s: float) -> float:
        """Somebody came: end the span at the first boundary from now on; when that is."""
        assert self._steps is not None
        self._planned = min(self._planned, self._steps.until(now_s - self._since_s))
        self.span += 1
        return self._since_s + self._steps.seconds(self._planned)

    def end_span(self, now_s: float) -> list[Job]:
        """The steps that were planned have been made; the sequences that have ended."""
        done = []
        for job in self._ready:
            job.generated_tokens += self._planned
            self._hold(job, job.tokens - 1)  # the last token was sampled, not computed
            if job.generated_tokens == job.output_tokens:
                done.append(job)
        for job in done:
            job.finished_s = now_s
            del self.batch[job]
            self._release(job)
        return done

    def context_at(self, now_s: float) -> int:
        """KV tokens of the sequences that decode, some way into a span."""
        if self._steps is None:
            return 0
        steps = self._steps.until(now_s - self._since_s) if now_s > self._since_s else 0
        return self.context_tokens + min(steps, self._planned) * len(self._ready)

    def _take_over(self, now_s: float) -> list[Job]:
        """Pending prompts whose blocks all fit: they have them from now on."""
        came = []
        # An idle worker reserves for all of them before the first one's blocks can be found.
        found = (
            None if self.batch or self.waiting else [self.pool.hits(j.keys) for j in self.pending]
        )
        while self.pending and len(self.batch) < SEQUENCES_MAX:
            job = self.pending[0]
            hits = self.pool.hits(job.keys)
            if found is not None:
                hits = _common(hits, found[len(came)])
            if not self._take(job, hits):
                break
            self.pending.popleft()
            job.joined_s = now_s
            job.decode_number = next(self._numbers)
            job.kv_tokens = job.prompt_tokens
            self.waiting.append(job)
            came.append(job)
        return came

    def _take(self, job: Job, hits: list[int]) -> bool:
        """Hold all blocks of its prompt, if they fit; `hits` are there."""
        wanted = blocks_of(job.prompt_tokens)
        if wanted - self.pool.held(hits) > self.pool.room:
            return False
        self.pool.hold(hits)
        rest = job.keys[len(hits) :]
        hits += [self.pool.take(key) for key in rest]
        if len(hits) < wanted:
            hits.append(self.pool.take(PARTIAL))
        job.decode_blocks = hits
        return True

    def _schedule_batch(self) -> tuple[int, bool]:
        """Blocks for what this step computes; the tokens that it has left, and whether somebody
        was preempted."""
        budget, is_tight = PASS_TOKENS_MAX, False
        for job in list(self.batch):
            if not budget:
                break
            if job not in self.batch:
                continue
            tokens = min(job.tokens - job.kv_tokens, budget)
            while job in self.batch and self._missing(job, job.kv_tokens + tokens) > self.pool.room:
                self._preempt(next(reversed(self.batch)))
                is_tight = True
            if job in self.batch:
                self._hold(job, job.kv_tokens + tokens)
                budget -= tokens
        return budget, is_tight

    def _preempt(self, job: Job) -> None:
        del self.batch[job]
        self._release(job)
        job.kv_tokens = 0
        job.preemptions += 1
        self.waiting.appendleft(job)

    def _admit(self, budget: int) -> None:
        """Those that wait join the batch, in their order, as long as they fit."""
        is_pending = bool(self.pending)
        while self.waiting and len(self.batch) < SEQUENCES_MAX:
            chosen = (job for job in self.waiting if job.kv_tokens or not is_pending)
            job = next(chosen, None)
            if job is None:
                return
            if not job.kv_tokens:
                used = self._come_back(job, budget)
                if not used:
                    return
                budget -= used
            self.waiting.remove(job)
            self.batch[job] = None

    def _come_back(self, job: Job, budget: int) -> int:
        """What a step computes again of a preempted sequence; 0 when it does not fit."""
        full = (job.tokens - 1) // BLOCK_TOKENS
        hits = self.pool.hits([*job.keys, *(
            _answer_key(job, place) for place in range(len(job.keys), full)
        )])  # fmt: skip
        if blocks_of(job.tokens) - self.pool.held(hits) > self.pool.room:
            return 0
        cached = len(hits) * BLOCK_TOKENS
        tokens = min(job.tokens - cached, budget)
        if tokens:
            self.pool.hold(hits)
            job.decode_blocks, job.kv_tokens = hits, cached
            self._hold(job, cached + tokens)
        return tokens

    def _steps_that_fit(self) -> int:
        """Until the first sequence ends, or as many as find blocks to grow into."""
        fit = min(job.output_tokens - job.generated_tokens for job in self._ready)
        if self._missing_after(fit) <= self.pool.room:
            return fit
        least = 1  # this step has its blocks
        while fit - least > 1:
            middle = (least + fit) // 2
            if self._missing_after(middle) <= self.pool.room:
                least = middle
            else:
                fit = middle
        return least

    def _missing_after(self, steps: int) -> int:
        return sum(self._missing(job, job.tokens + steps - 1) for job in self._ready)

    def _missing(self, job: Job, tokens: int) -> int:
        """Blocks that it has yet to take before it has the KV of its first `tokens`."""
        return blocks_of(tokens) - len(job.decode_blocks)

    def _hold(self, job: Job, tokens: int) -> None:
        """It has the KV of its first `tokens`; what is full now can be found."""
        blocks, full = job.decode_blocks, job.kv_tokens // BLOCK_TOKENS
        blocks += [self.pool.take(PARTIAL) for _ in range(blocks_of(tokens) - len(blocks))]
        for place in range(full, tokens // BLOCK_TOKENS):
            is_prompt = place < len(job.keys)
            self.pool.fill(blocks[place], job.keys[place] if is_prompt else _answer_key(job, place))
        job.kv_tokens = tokens

    def _release(self, job: Job) -> None:
        self.pool.release(job.decode_blocks)
        job.decode_blocks = []

    def _stuck(self) -> str:
        waiting = ", ".join(f"{job.tokens} tokens" for job in (*self.waiting, *self.pending))
        return f"decode worker {self.number}: nothing runs, and what waits does not fit: {waiting}"


def _common(hits: list[int], others: list[int]) -> list[int]:
    """What both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(hits, others, strict=False))
    return [block for block, _ in pairs]


def _answer_key(job: Job, place: int) -> int:
    """Names a block that ends in the answer; below all keys of prompts and PARTIAL."""
    return -2 - job.decode_number * PLACES_MAX - place
