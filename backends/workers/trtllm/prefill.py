"""Prefill on TensorRT-LLM: it computes staged prompts; tokens and KV come when it says so.

A prompt has its cached prefix loaded into pages of the staging pool, is staged and submitted, for
one token. What the engine computes comes back block by block into the pages and goes to the store;
the answer leaves behind the last one. The engine says the token and the end of a prompt, the
connector what it need not compute and which KV is in the pages; these come from two threads, in any
order.

The engine takes prompts in the order in which it gets them, so only as many are given to it as
keep it busy for two steps: the others wait in our queue, whose order is the conductor's.

handoff "native": the engine hands KV to the decode engine by itself, so the answer does not wait
for the store; blocks go there all the same, for the next prompt with that prefix.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backends.config_pbtxt import PrefillConfig
from backends.engine.batching.batching import Chunk
from backends.engine.connected.generation import EngineRun, Order, Outcome
from backends.engine.connected.messages import Stage
from backends.engine.trtllm.settings import TrtllmConfig
from backends.errors import WorkerUnavailable
from backends.workers.driver import Samples
from backends.workers.jobs import PrefillJob
from backends.workers.kv_writer import BlockPut
from backends.workers.lifecycle.events import Answerable, Computed, EngineLeft, Ready, Sampled
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.trtllm.driver import UNCLAIMED_S_MAX, TrtllmDriver
from mooncake_store.block_keys import chain_seed, packed_tokens
from mooncake_store.layout import blocks_touched

log = logging.getLogger(__name__)
STEPS_AHEAD = 2  # so many steps' tokens are in the engine's own queue
SAME_STEP_S = 0.001  # first tokens that come so close to each other are of one step


@dataclass(slots=True, eq=False)
class StagedPrompt:
    """What has been heard of one prompt at the engine; hears it as its sink."""

    driver: TrtllmPrefill
    job: PrefillJob
    whole_tokens: int  # of the prompt, in whole pages of the engine: all that is saved
    unsaved: range  # blocks that are not wholly in their pages yet
    running: EngineRun | None = None
    started_tokens: int = 0  # cached ones when the engine got it
    given_s: float = 0.0  # to the engine
    ended_s: float = 0.0  # by the engine
    token_id: int | None = None
    is_claimed: bool = False  # the connector recognised it
    is_loaded: bool = False  # what it claimed was what had been verified, on all ranks
    is_unmatched: bool = False  # it did not, and the engine has computed it all the same
    has_native: bool = False  # the engine has ended it, and said what its other half needs
    is_announced: bool = False  # the first token is on its way ahead of the reply, if it may go
    is_answered: bool = False

    @property
    def is_known(self) -> bool:
        """What of it was cached, and that it was that: the connector's words may come a little
        after the engine's."""
        return (self.is_claimed and self.is_loaded) or self.is_unmatched

    def tokens(self, token_ids: list[int]) -> None:
        self.driver.computed(self, token_ids[0])

    def ended(self, outcome: Outcome) -> None:
        self.driver.ended(self, outcome)


class TrtllmPrefill(TrtllmDriver[PrefillWorker, PrefillJob]):
    def __init__(
        self, worker_id: str, worker: PrefillConfig, repository: str, config: TrtllmConfig
    ) -> None:
        self._tokens_ahead_max = STEPS_AHEAD * worker.chunk_tokens
        self._prompts: dict[PrefillJob, StagedPrompt] = {}
        self._step_began_s = self._step_ended_s = 0.0
        self._staging = threading.Lock()
        super().__init__(
            "prefill",
            worker_id,
            worker,
            config,
            repository,
            worker.queue_requests_max,
            worker.chunk_tokens,
        )

    def measure(self, budget_s: float) -> Samples:
        return self.engine.measured_prefill(budget_s)

    def check(self, job: PrefillJob) -> None:
        self._sampling(job)  # refused now rather than when it is staged
        if self.is_native:
            job.put.decode_inbox = ""  # nothing is read ahead: the engines do it themselves

    def has_room(self) -> bool:
        return self._tokens_ahead() < self._tokens_ahead_max

    def _tokens_ahead(self) -> int:
        """What the engine has got or gets, and has not computed."""
        return sum(
            len(job.token_ids) - job.cached_tokens
            for job in self._worker.jobs.values()
            if job.put.pages and not job.computed_at_s
        )

    def next_step(self, now_s: float) -> Callable[[], None] | None:
        is_busy = any(
            prompt.running is not None and not prompt.ended_s
            for prompt in self._prompts.values()
            if not prompt.job.has_left
        )
        # Of all that it has got together: of one alone it may say nothing.
        predicted_s = self._worker.estimate.seconds(self._tokens_ahead(), 0)
        self._look_after(now_s, is_busy, predicted_s)
        late = self._late(now_s)
        return functools.partial(self._give_up, late) if late else None

    # -- a prompt goes to the engine

    def start(self, job: PrefillJob) -> None:
        """Stage, then submit.

        One at a time: of equal prompts the engine's first request takes the first stage, so they
        must come in the same order, or one that is cancelled takes the other's stage with it.
        """
        with self._staging:
            prompt = self._stage(job)
            order = self._order(job)
            worker = self._worker
            with worker.lock:
                worker.post(job, Ready())
                if not job.is_leaving:
                    prompt.started_tokens = job.cached_tokens
                    prompt.given_s = time.monotonic()
                    prompt.running = self.engine.generate(order, prompt)

    def _stage(self, job: PrefillJob) -> StagedPrompt:
        put, salt, page = job.put, job.request.cache_salt, self.config.page_tokens
        whole_tokens = len(job.token_ids) // page * page  # decode computes the rest again
        stop = blocks_touched(whole_tokens, self._block_tokens)
        unsaved = range(put.first_block, max(put.first_block, stop))
        prompt = StagedPrompt(self, job, whole_tokens, unsaved)
        if not job.is_leaving:
            self._take_slots(put, unsaved)
            places, uses = self._places.places(put.pages, put.first_block)
            with self._worker.lock:
                self._prompts[job] = prompt  # whatever comes of it, it is to be unstaged
            self._staged.stage(
                Stage(
                    job.request_id,
                    bytes(packed_tokens(job.token_ids)),
                    salt,
                    chain_seed(self._worker.process.fingerprint, cache_salt=salt),
                    list(put.keys),
                    places,
                    put.first_block * self._block_tokens,
                    uses,
                    whole_tokens,
                )
            )
        return prompt

    def _take_slots(self, put: BlockPut, unsaved: range) -> None:
        """Of the own node, for what will be computed: the engine saves it there."""
        if not unsaved or self._regions is None or not self._regions.is_open:
            return
        self._worker.writer.allocate_now(put, unsaved, may_use_objects=not self.is_native)
        page_of = {block: put.pages[block] for block in unsaved if block in put.slots}
        taken = self._places.save_into({page: put.slots[b] for b, page in page_of.items()})
        put.in_place = {block for block, page in page_of.items() if page in taken}

    def _order(self, job: PrefillJob) -> Order:
        request = job.request
        native = self.is_native and request.decode_inbox
        return Order(
            job.token_ids.tolist(),
            self._sampling(job),
            request.cache_salt,
            is_streaming=False,
            disaggregated_params=self.engine.native_params(job.request_id, b"") if native else None,
        )

    def _sampling(self, job: PrefillJob) -> Any:
        """Of the one token behind its tokens."""
        request, prompt = job.request, job.request.prompt_tokens
        return self.engine.sampling(request.sampling, len(job.token_ids) - prompt, 1, prompt)

    # -- what the engine says: in the LLM's thread, or in the channel's

    def _prompt_of(self, request_id: str) -> StagedPrompt | None:
        """Of a job that has not left; with the lock held."""
        job = self._worker.jobs.get(request_id)
        return None if job is None else self._prompts.get(job)

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        with self._worker.lock:
            prompt = self._prompt_of(request_id)
            if prompt is None:
                return
            prompt.is_claimed = True
            prompt.is_loaded = prompt.is_loaded or not loaded_tokens
            if not prompt.is_announced:
                job = prompt.job
                job.cached_tokens = min(local_tokens + loaded_tokens, len(job.token_ids) - 1)
        self._go_on(prompt)

    def loaded(self, request_id: str) -> None:
        with self._worker.lock:
            prompt = self._prompt_of(request_id)
            if prompt is None:
                return
            prompt.is_loaded = True
        self._go_on(prompt)

    def computed(self, prompt: StagedPrompt, token_id: int) -> None:
        now_s, worker, job = time.monotonic(), self._worker, prompt.job
        with worker.lock:
            if job.has_left or prompt.token_id is not None:
                return
            if now_s - self._step_ended_s > SAME_STEP_S:
                self._step_began_s = self._step_ended_s
            self._step_ended_s = now_s
            worker.process.watch.progressed(now_s)
            job.computing_from_s = max(prompt.given_s, self._step_began_s)
            job.compute_s = now_s - job.computing_from_s
            job.computed_at_s = now_s
            prompt.token_id = token_id
            left = len(job.token_ids) - prompt.started_tokens
            worker.batching.computed([Chunk(job.request_id, prompt.started_tokens, left, True)])
            worker.lock.notify_all()
        self._go_on(prompt)

    def ended(self, prompt: StagedPrompt, outcome: Outcome) -> None:
        prompt.ended_s = time.monotonic()
        job = prompt.job
        if job.has_left:
            return
        if outcome.error is not None:
            self._failed(outcome.error)
            self._worker.fail(job, outcome.error)
            return
        if outcome.finish_reason == "stop" and prompt.token_id is None:
            self.computed(prompt, job.request.sampling.end_ids[0])  # it keeps the end id itself
        elif prompt.token_id is None:
            if not job.is_leaving:  # else it is dropped at the next turn
                error = WorkerUnavailable(f"the engine ended a prompt: {outcome.finish_reason}")
                self._failed(error)
                self._worker.fail(job, error)
            return
        # In this order: from then on another thread may answer.
        job.native = outcome.native
        prompt.has_native = True
        self._go_on(prompt)

    def saved(self, request_id: str, tokens: int) -> None:
        """So many leading tokens are in their places, of every rank."""
        with self._worker.lock:
            prompt = self._prompt_of(request_id)
            if prompt is None:
                return
            job, unsaved = prompt.job, prompt.unsaved
            done = unsaved.stop if tokens >= prompt.whole_tokens else tokens // self._block_tokens
            new = range(unsaved.start, max(unsaved.start, done))
            prompt.unsaved = range(new.stop, unsaved.stop)
            if new:  # with the lock held: the answer must stand behind it in the writer's line
                self._worker.writer.put_whole(job.put, new, is_handover=not self.is_native)
                self._worker.settle_behind(job, new)
        self._go_on(prompt)

    def _go_on(self, prompt: StagedPrompt) -> None:
        """Say what can be said by now, each once: the first token when it is known what was cached,
        the answer when all KV is in the store (or, native, when the engine has said its word)."""
        worker, job = self._worker, prompt.job
        with worker.lock:
            token_id = prompt.token_id
            if token_id is None or job.has_left or not prompt.is_known:
                return
            is_first, prompt.is_announced = not prompt.is_announced, True
            is_ready = prompt.has_native if self.is_native else not prompt.unsaved
            is_answer = is_ready and not prompt.is_answered
            prompt.is_answered = prompt.is_answered or is_ready
            is_over = self.is_native and prompt.is_answered and not prompt.unsaved
        if is_first:
            worker.post(job, Sampled(token_id))
        if is_answer:
            self._health.went_well()
            worker.post(job, Answerable() if self.is_native else Computed())
        if is_over:
            worker.post(job, Computed())

    # -- prompts that nothing more is heard of

    def _late(self, now_s: float) -> list[StagedPrompt]:
        """Ended, but their KV does not come out; with the lock held."""
        late = []
        for prompt in self._prompts.values():
            limit_s = self._transfer_s_max if prompt.is_claimed else UNCLAIMED_S_MAX
            is_open = bool(prompt.unsaved) or not prompt.is_known
            is_late = prompt.ended_s and is_open and now_s - prompt.ended_s > limit_s
            if is_late and not prompt.job.has_left:
                late.append(prompt)
        return late

    def _give_up(self, late: Sequence[StagedPrompt]) -> None:
        for prompt in late:
            if prompt.is_claimed:
                error = WorkerUnavailable("the engine computed a prompt, but gave no KV")
                self._failed(error)
                self._worker.fail(prompt.job, error)
            else:
                self._hand_over_nothing(prompt)

    def _hand_over_nothing(self, prompt: StagedPrompt) -> None:
        """Its stage was never matched: this release may not tell connectors of salts, say. The
        token is right; decode computes the prompt again instead of loading it."""
        job = prompt.job
        log.warning("the connector did not recognise %s: decode computes it again", job.request_id)
        with self._worker.lock:
            prompt.is_unmatched, prompt.unsaved = True, range(0)
            job.hands_over_blocks = False
        self._worker.settle_behind(job, range(len(job.put.keys)))
        self._go_on(prompt)

    # -- and leaves

    def leave(self, job: PrefillJob) -> None:
        def left(is_certain: bool = True) -> None:
            self._worker.post(job, EngineLeft(is_certain))

        prompt = self._prompts.pop(job, None)
        if prompt is None:  # it was never staged
            left()
            return
        if prompt.running is not None:
            prompt.running.abort()
        self._staged.give_back(job.request_id, job.pages_left, left)
