"""A decode worker of Dynamo's engine: one batch, a step at a time, many steps at once.

At each boundary between two steps it takes over pending prompts, first come first served, while
there are fewer than 256 sequences and all blocks of the next prompt fit (what it holds of the
prompt's prefix already counts). Taking over is free. Each step then gives every sequence a token,
the first one included. A sequence takes one more block for each 512 tokens.

Between two changes nothing but the context grows, so the worker plans a *span*: all steps until
the first sequence ends. A prompt that arrives meanwhile cuts the span at the next boundary.

Dynamo preempts when a sequence finds no block to grow into; none of its own replays of the trace
comes near that, so there is nothing to compare with, and this worker refuses to guess.

Not here: time (replay.py), how long steps take (timing.py).
"""

from __future__ import annotations

from collections import deque

from loadtest.simulator.dynamo.blocks import PARTIAL, BlockPool
from loadtest.simulator.dynamo.job import Job
from loadtest.simulator.dynamo.timing import BLOCK_TOKENS, SEQUENCES_MAX, Steps, blocks_of


class OutOfBlocks(Exception):
    """A sequence cannot grow: the replay is outside of what the engine's rules cover."""


class DecodeWorker:
    def __init__(self, number: int, blocks: int) -> None:
        self.number = number
        self.pool = BlockPool(blocks)
        self.room_tokens = blocks * BLOCK_TOKENS
        self.pending: deque[Job] = deque()
        self.batch: dict[Job, int] = {}  # -> tokens it has generated
        self.context_tokens = 0  # KV of the batch at the start of the span
        self._steps: Steps | None = None
        self._planned = 0  # steps until the first sequence ends
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
        came = []
        while self.pending and len(self.batch) < SEQUENCES_MAX and self._take(self.pending[0]):
            job = self.pending.popleft()
            job.joined_s = now_s
            self.batch[job] = 0
            self.context_tokens += job.prompt_tokens
            came.append(job)
        self.span += 1
        if not self.batch:
            assert not self.pending, f"{self.pending[0].prompt_tokens} tokens fit no decode worker"
            self._steps = None
            return came, None
        steps = Steps.of(len(self.batch), self.context_tokens, self.room_tokens)
        for job in came:
            job.first_token_s = now_s + steps.first_s
        self._steps, self._since_s = steps, now_s
        self._planned = min(job.output_tokens - done for job, done in self.batch.items())
        return came, now_s + steps.seconds(self._planned)

    def cut(self, now_s: float) -> float:
        """Somebody came: end the span at the first boundary from now on; when that is."""
        assert self._steps is not None
        self._planned = min(self._planned, self._steps.until(now_s - self._since_s))
        self.span += 1
        return self._since_s + self._steps.seconds(self._planned)

    def end_span(self, now_s: float) -> list[Job]:
        """The steps that were planned have been made; the sequences that have ended."""
        steps, done = self._planned, []
        for job in self.batch:
            self.batch[job] += steps
            self._grow(job, self.batch[job])
            if self.batch[job] == job.output_tokens:
                done.append(job)
        self.context_tokens += steps * len(self.batch)
        for job in done:
            job.finished_s = now_s
            self.context_tokens -= job.prompt_tokens + self.batch.pop(job)
            self.pool.release(job.decode_blocks)
            job.decode_blocks = []
        return done

    def context_at(self, now_s: float) -> int:
        """KV tokens of the batch some way into a span."""
        if self._steps is None:
            return 0
        steps = self._steps.until(now_s - self._since_s) if now_s > self._since_s else 0
        return self.context_tokens + min(steps, self._planned) * len(self.batch)

    def _take(self, job: Job) -> bool:
        """Hold all blocks of its prompt, if they fit."""
        hits = self.pool.hits(job.keys)
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

    def _grow(self, job: Job, generated: int) -> None:
        """Blocks for what it has generated; those that are full now become evictable later."""
        blocks, tokens = job.decode_blocks, job.prompt_tokens + generated
        if tokens <= len(blocks) * BLOCK_TOKENS:
            return
        full = len(job.keys)
        for place in range(len(blocks), blocks_of(tokens)):
            if not self.pool.room:
                raise OutOfBlocks(f"decode worker {self.number}: no block to grow into")
            if place > full:
                self.pool.fill(blocks[-1])
            blocks.append(self.pool.take(PARTIAL))
