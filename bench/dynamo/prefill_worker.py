"""A prefill worker of Dynamo's engine: passes of at most 8,192 new tokens.

A pass takes prompts in the order of their order keys until its tokens are spent; the last one gets
the remaining tokens and continues later. A waiting prompt that does not fit blocks those after it:
it needs its blocks less those of its cached prefix that are held. Its first chunk pins its cached
blocks. Blocks are taken chunk by chunk, and can be hit from then on, within the same pass too. A
finished prompt keeps its blocks until the decode worker has admitted it.

With FIFO order keys this is Dynamo's engine: the partly computed prompt came first. With other
order keys a short prompt overtakes a long one between two chunks, as in our own workers
(backends/engine/batching/batching.py). So there may be several partly computed prompts, and the
blocks that they still need count as taken. With `overhead_tokens` a pass may end before its tokens
are spent, so that short prompts need not wait for others (conductor/queue_order.py).

Not here: time (fleet.py), the order of the queue (the order key of a job).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from bench.dynamo.blocks import PARTIAL, BlockPool, Watcher
from bench.dynamo.timing import BLOCK_TOKENS, PASS_TOKENS_MAX, blocks_of, prefill_pass_s
from conductor.queue_order import ALWAYS, shares_step
from loadtest.simulator.cluster.job import SimulatedJob


@dataclass(slots=True, eq=False)
class EnginePrompt:
    """A prompt at this worker, and its blocks."""

    job: SimulatedJob
    prompt_tokens: int
    keys: Sequence[bytes]  # of its full blocks
    computed_tokens: int = 0  # including the cached ones
    blocks: list[int] = field(default_factory=list)

    @property
    def hittable(self) -> Sequence[bytes]:
        """Keys that may be cached: the last token of a prompt is always computed."""
        return self.keys[: (self.prompt_tokens - 1) // BLOCK_TOKENS]


Queued = tuple[float, int, EnginePrompt]  # (order key, sequence number, prompt): the least is next


class DynamoPrefillWorker:
    """`overhead_tokens`: when prompts share a pass; by default a pass is filled, as in Dynamo."""

    def __init__(
        self,
        name: str,
        blocks: int,
        watcher: Watcher | None = None,
        overhead_tokens: float = ALWAYS,
    ) -> None:
        self.name = name
        self.overhead_tokens = overhead_tokens
        self.pool = BlockPool(blocks, watcher)
        self._waiting: list[Queued] = []  # both are heaps
        self._partial: list[Queued] = []
        self._reserved = 0  # blocks that partial prompts will still take
        self._arrivals = 0
        self._pass: list[EnginePrompt] = []  # prompts that end with the running pass
        # their blocks, until decode has admitted them
        self._computed: dict[SimulatedJob, list[int]] = {}
        self.pass_tokens = 0
        self.is_busy = False

    @property
    def requests(self) -> int:
        """Number of waiting and running prompts."""
        return len(self._waiting) + len(self._partial) + len(self._pass)

    @property
    def queue_tokens(self) -> int:
        """Tokens to compute; a prompt before its lookup counts as uncached."""
        waiting = sum(each.prompt_tokens for _, _, each in self._waiting)
        partial = sum(each.prompt_tokens - each.computed_tokens for _, _, each in self._partial)
        return waiting + partial + self.pass_tokens

    def add(self, job: SimulatedJob, order_key_s: float = 0.0) -> None:
        """Queue it: the least order key first, equal ones in order of arrival."""
        self._arrivals += 1
        prompt = EnginePrompt(job, job.prompt_tokens, job.keys)
        heappush(self._waiting, (order_key_s, self._arrivals, prompt))

    def start_pass(self, now_s: float) -> float:
        """Seconds of the next pass; 0 when there is nothing to compute."""
        assert not self.is_busy
        budget, cut = PASS_TOKENS_MAX, list[Queued]()
        is_blocked, sharing, requests = False, 0, self.requests
        while budget and (queued := self._next(is_blocked)):
            prompt = queued[2]
            if not self._is_shared(prompt, budget, sharing, requests - sharing):
                break
            if prompt.job.started_s is None:
                if not self._admit(prompt):
                    is_blocked = True
                    continue
                heappop(self._waiting)
                prompt.job.started_s = now_s
            else:
                heappop(self._partial)
            budget -= self._compute(prompt, budget)
            sharing += 1
            if prompt.computed_tokens < prompt.prompt_tokens:
                cut.append(queued)
        for queued in cut:
            heappush(self._partial, queued)
        self.pass_tokens = PASS_TOKENS_MAX - budget
        self.is_busy = self.pass_tokens > 0
        return prefill_pass_s(self.pass_tokens)

    def _is_shared(self, prompt: EnginePrompt, budget: int, sharing: int, behind: int) -> bool:
        """Whether this prompt is computed in the same pass as those before it."""
        if not sharing or self.overhead_tokens == ALWAYS:
            return True
        done = prompt.computed_tokens
        if prompt.job.started_s is None:
            done = len(self.pool.hits(prompt.hittable)) * BLOCK_TOKENS
        tokens = prompt.prompt_tokens - done
        whole = tokens if tokens <= budget else PASS_TOKENS_MAX
        return shares_step(sharing, behind, whole, self.overhead_tokens)

    def _next(self, is_blocked: bool) -> Queued | None:
        """The prompt with the least order key that may be computed now."""
        waiting = None if is_blocked or not self._waiting else self._waiting[0]
        partial = self._partial[0] if self._partial else None
        if waiting is None or (partial is not None and partial < waiting):
            return partial
        return waiting

    def _admit(self, prompt: EnginePrompt) -> bool:
        """Pin its cached blocks and reserve the others, if they fit."""
        hits = self.pool.hits(prompt.hittable)
        wanted = blocks_of(prompt.prompt_tokens)
        if wanted - self.pool.held(hits) > self.pool.room - self._reserved:
            return False
        self.pool.hold(hits)
        self._reserved += wanted - len(hits)
        prompt.blocks = hits
        prompt.job.cached_tokens = prompt.computed_tokens = len(hits) * BLOCK_TOKENS
        return True

    def _compute(self, prompt: EnginePrompt, budget: int) -> int:
        """Give the prompt at most `budget` tokens of this pass, and their blocks."""
        tokens = min(budget, prompt.prompt_tokens - prompt.computed_tokens)
        prompt.computed_tokens += tokens
        # A block that this chunk fills in part is taken now and completed by a later chunk.
        blocks, full = prompt.blocks, len(prompt.keys)
        for number in range(len(blocks), blocks_of(prompt.computed_tokens)):
            blocks.append(self.pool.take(prompt.keys[number] if number < full else PARTIAL))
            self._reserved -= 1
        if prompt.computed_tokens == prompt.prompt_tokens:
            self._pass.append(prompt)
        return tokens

    def end_pass(self) -> list[SimulatedJob]:
        done, self._pass = self._pass, []
        self.pass_tokens, self.is_busy = 0, False
        self._computed.update((prompt.job, prompt.blocks) for prompt in done)
        return [prompt.job for prompt in done]

    def release(self, job: SimulatedJob) -> None:
        """The decode worker has its own copy of the KV."""
        self.pool.release(self._computed.pop(job))
