"""A decode worker of Dynamo's engine: one batch, a step at a time, many steps at once.

At each boundary between two steps it admits pending prompts in FIFO order, while there are fewer
than 256 sequences and all blocks of the next prompt fit (held blocks of the prompt's prefix already
count). Admission takes no time. Each step then gives every sequence a token, the first one
included. A sequence takes one more block for each 512 tokens, before the step that computes the
first of them.

A sequence that finds no block to grow into preempts the sequence that joined last, perhaps itself,
until there is one (lifo, the default of Dynamo's mocker). A preempted sequence releases its blocks
to the cache, keeps its generated tokens, and waits before all others; no sequence joins in that
step. It rejoins when all its blocks fit, less those that are held, and recomputes the blocks that
left the cache, 8,192 tokens in one step with the batch. This takes no time of its own in Dynamo's
model, but later sequences of the batch get no token while it uses up the step's tokens. It stays
out while prompts are pending; while it waits, admitted prompts wait after it with their blocks.
Both as in `lib/mocker/src/scheduler/vllm/core.rs` of Dynamo.

Between two changes only the context grows. So the worker plans a *span*: all steps until the first
sequence ends or no block is left. An arriving prompt cuts the span at the next boundary.

Not here: time (fleet.py), the time of a step (timing.py).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.dynamo.blocks import PARTIAL, BlockPool, Key
from bench.dynamo.timing import BLOCK_TOKENS, PASS_TOKENS_MAX, SEQUENCES_MAX, Steps, blocks_of
from loadtest.simulator.cluster.job import SimulatedJob

SEQUENCE_BLOCKS_MAX = 2**20  # blocks of one sequence


class OutOfBlocks(Exception):
    """Nothing can run and nothing can end: Dynamo's own replay also ends with an error here."""


@dataclass(slots=True, eq=False)
class EngineSequence:
    """A request from the moment that its prompt's blocks are here."""

    job: SimulatedJob
    number: int  # order in which this worker admitted it
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[bytes]  # of the full blocks of its prompt
    blocks: list[int]
    kv_tokens: int  # tokens of prompt and answer with KV here
    generated_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and the answer; the KV of the last one may be missing."""
        return self.prompt_tokens + self.generated_tokens


class DynamoDecodeWorker:
    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        self.pool = BlockPool(blocks)
        self.room_tokens = blocks * BLOCK_TOKENS
        self.pending: deque[SimulatedJob] = deque()  # their prompts are still at prefill
        # To join the batch, preempted sequences first.
        self.waiting: deque[EngineSequence] = deque()
        self.batch: dict[EngineSequence, None] = {}  # in order of joining
        self.context_tokens = 0  # KV of the decoding sequences, at the start of the span
        # sequences that get a token in each step of the span
        self._ready: list[EngineSequence] = []
        self._numbers = itertools.count()
        self._steps: Steps | None = None
        self._planned = 0  # steps of the span
        self._since_s = 0.0
        self.span = 0  # number of the plan: events of an older plan are ignored

    @property
    def is_idle(self) -> bool:
        return self._steps is None

    @property
    def step_s(self) -> float:
        """Time of the first step of the span; 0 when idle."""
        return 0.0 if self._steps is None else self._steps.first_s

    def plan(self, now_s: float) -> tuple[list[SimulatedJob], float | None]:
        """At a boundary: admit prompts that fit, then plan. Returns the admitted jobs and the
        span's end."""
        came: list[SimulatedJob] = []
        self.span += 1
        while True:
            came += self._take_over(now_s)
            budget, is_tight = self._schedule_batch()
            if not is_tight:
                self._admit(budget)
            # A step that only recomputes lost blocks takes no time: continue with the next one.
            self._ready = [each for each in self.batch if each.kv_tokens == each.tokens]
            if self._ready or not self.batch:
                break
        if not self.batch:
            if self.waiting or self.pending:
                raise OutOfBlocks(self._stuck())
            self._steps = None
            return came, None
        self.context_tokens = sum(sequence.tokens for sequence in self._ready)
        steps = Steps.of(len(self._ready), self.context_tokens, self.room_tokens)
        for sequence in self._ready:
            if sequence.job.first_token_s is None:
                sequence.job.first_token_s = now_s + steps.first_s
        is_steady = not is_tight and len(self._ready) == len(self.batch)
        self._steps, self._since_s = steps, now_s
        self._planned = self._steps_that_fit() if is_steady else 1
        return came, now_s + steps.seconds(self._planned)

    def cut(self, now_s: float) -> float:
        """A prompt arrived: end the span at the next boundary; returns its time."""
        assert self._steps is not None
        self._planned = min(self._planned, self._steps.until(now_s - self._since_s))
        self.span += 1
        return self._since_s + self._steps.seconds(self._planned)

    def end_span(self, now_s: float) -> list[SimulatedJob]:
        """The planned steps have been made; returns the jobs that ended."""
        done = []
        for sequence in self._ready:
            sequence.generated_tokens += self._planned
            self._hold(sequence, sequence.tokens - 1)  # the last token was sampled, not computed
            if sequence.generated_tokens == sequence.output_tokens:
                done.append(sequence)
        for sequence in done:
            sequence.job.finished_s = now_s
            del self.batch[sequence]
            self._release(sequence)
        return [sequence.job for sequence in done]

    def context_at(self, now_s: float) -> int:
        """KV tokens of the decoding sequences at a time within the span."""
        if self._steps is None:
            return 0
        steps = self._steps.until(now_s - self._since_s) if now_s > self._since_s else 0
        return self.context_tokens + min(steps, self._planned) * len(self._ready)

    def _take_over(self, now_s: float) -> list[SimulatedJob]:
        """Admit pending prompts whose blocks all fit; they hold their blocks from now on."""
        came: list[SimulatedJob] = []
        # An idle worker reserves for all of them before the first one's blocks can be found.
        found = (
            None if self.batch or self.waiting else [self.pool.hits(j.keys) for j in self.pending]
        )
        while self.pending and len(self.batch) < SEQUENCES_MAX:
            job = self.pending[0]
            hits = self.pool.hits(job.keys)
            if found is not None:
                hits = _common(hits, found[len(came)])
            blocks = self._take(job, hits)
            if blocks is None:
                break
            self.pending.popleft()
            job.joined_s = now_s
            self.waiting.append(
                EngineSequence(
                    job,
                    next(self._numbers),
                    job.prompt_tokens,
                    job.output_tokens,
                    job.keys,
                    blocks,
                    kv_tokens=job.prompt_tokens,
                )
            )
            came.append(job)
        return came

    def _take(self, job: SimulatedJob, hits: list[int]) -> list[int] | None:
        """Hold all blocks of its prompt, of which `hits` are cached; None when they do not fit."""
        wanted = blocks_of(job.prompt_tokens)
        if wanted - self.pool.held(hits) > self.pool.room:
            return None
        self.pool.hold(hits)
        hits += [self.pool.take(key) for key in job.keys[len(hits) :]]
        if len(hits) < wanted:
            hits.append(self.pool.take(PARTIAL))
        return hits

    def _schedule_batch(self) -> tuple[int, bool]:
        """Take blocks for this step; returns its remaining tokens, and whether a sequence was
        preempted."""
        budget, is_tight = PASS_TOKENS_MAX, False
        for sequence in list(self.batch):
            if not budget:
                break
            if sequence not in self.batch:
                continue
            tokens = min(sequence.tokens - sequence.kv_tokens, budget)
            until = sequence.kv_tokens + tokens
            while sequence in self.batch and self._missing(sequence, until) > self.pool.room:
                self._preempt(next(reversed(self.batch)))
                is_tight = True
            if sequence in self.batch:
                self._hold(sequence, until)
                budget -= tokens
        return budget, is_tight

    def _preempt(self, sequence: EngineSequence) -> None:
        del self.batch[sequence]
        self._release(sequence)
        sequence.kv_tokens = 0
        sequence.job.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, budget: int) -> None:
        """Waiting sequences join the batch, in their order, as long as they fit."""
        is_pending = bool(self.pending)
        while self.waiting and len(self.batch) < SEQUENCES_MAX:
            chosen = (each for each in self.waiting if each.kv_tokens or not is_pending)
            sequence = next(chosen, None)
            if sequence is None:
                return
            if not sequence.kv_tokens:
                used = self._come_back(sequence, budget)
                if not used:
                    return
                budget -= used
            self.waiting.remove(sequence)
            self.batch[sequence] = None

    def _come_back(self, sequence: EngineSequence, budget: int) -> int:
        """The tokens that a step recomputes of a preempted sequence; 0 when it does not fit."""
        full = (sequence.tokens - 1) // BLOCK_TOKENS
        full = max(full, len(sequence.keys))
        hits = self.pool.hits([_key(sequence, number) for number in range(full)])
        if blocks_of(sequence.tokens) - self.pool.held(hits) > self.pool.room:
            return 0
        cached = len(hits) * BLOCK_TOKENS
        tokens = min(sequence.tokens - cached, budget)
        if tokens:
            self.pool.hold(hits)
            sequence.blocks, sequence.kv_tokens = hits, cached
            self._hold(sequence, cached + tokens)
        return tokens

    def _steps_that_fit(self) -> int:
        """Steps until the first sequence ends, or as many as find blocks to grow into."""
        fit = min(sequence.output_tokens - sequence.generated_tokens for sequence in self._ready)
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
        return sum(self._missing(sequence, sequence.tokens + steps - 1) for sequence in self._ready)

    def _missing(self, sequence: EngineSequence, tokens: int) -> int:
        """Blocks that it still needs for the KV of its first `tokens`."""
        return blocks_of(tokens) - len(sequence.blocks)

    def _hold(self, sequence: EngineSequence, tokens: int) -> None:
        """It has the KV of its first `tokens`; blocks that became full can be found."""
        blocks, full = sequence.blocks, sequence.kv_tokens // BLOCK_TOKENS
        blocks += [self.pool.take(PARTIAL) for _ in range(blocks_of(tokens) - len(blocks))]
        for number in range(full, tokens // BLOCK_TOKENS):
            self.pool.fill(blocks[number], _key(sequence, number))
        sequence.kv_tokens = tokens

    def _release(self, sequence: EngineSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _stuck(self) -> str:
        sizes = [each.tokens for each in self.waiting] + [job.prompt_tokens for job in self.pending]
        waiting = ", ".join(f"{tokens} tokens" for tokens in sizes)
        return f"decode worker {self.name}: nothing runs, and what waits does not fit: {waiting}"


def _common(hits: list[int], others: list[int]) -> list[int]:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(hits, others, strict=False))
    return [block for block, _ in pairs]


def _key(sequence: EngineSequence, number: int) -> Key:
    """Key of a full block: by the prompt, or by a number where the block ends in the answer."""
    if number < len(sequence.keys):
        return sequence.keys[number]
    return sequence.number * SEQUENCE_BLOCKS_MAX + number
