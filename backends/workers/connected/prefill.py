"""Prefill on a connected engine: it computes staged prompts, and reports tokens and KV.

A prompt's cached prefix is verified in slots of the local node, or loaded into pages of the staging
pool. The prompt is staged, and submitted for one token. The engine's KV comes back block by block,
into slots or pages, and goes to the store. The engine reports the token and the end of the prompt.
The connector reports which tokens need no computation, and which KV is in place. The reports come
from two threads, in any order.

The engine takes prompts in the order in which it gets them. So it gets only as many as keep it busy
for two steps. The others wait in the worker's queue, whose order is the conductor's.

If the engine hands KV over by itself, the reply does not wait for the store. Blocks also go to
the store, for the next prompt with that prefix.
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
from backends.engine.connected.measuring import measured_prefill
from backends.engine.connected.messages import Stage
from backends.errors import WorkerUnavailable
from backends.token_logprobs import TokenLogprobs
from backends.workers.connected.driver import UNCLAIMED_S_MAX, ConnectedDriver, EngineUse
from backends.workers.driver import Samples
from backends.workers.jobs import PrefillJob
from backends.workers.kv_writer import BlockPut
from backends.workers.lifecycle.events import On
from backends.workers.prefill_worker import PrefillWorker
from mooncake_store.block_keys import chain_seed, packed_tokens
from mooncake_store.layout import blocks_touched

log = logging.getLogger(__name__)
STEPS_AHEAD = 2  # the engine's own queue has the tokens of this many steps
SAME_STEP_S = 0.001  # first tokens at this distance or less are of one step


@dataclass(slots=True, eq=False)
class StagedPrompt:
    """One prompt at the engine, and what was reported of it. The sink of its generation."""

    driver: ConnectedPrefill
    job: PrefillJob
    whole_tokens: int  # leading tokens whose KV is saved
    unsaved: range  # blocks whose KV is not complete in its place yet
    running: EngineRun | None = None
    started_tokens: int = 0  # cached tokens when the engine got the prompt
    given_s: float = 0.0  # time at which the engine got the prompt (monotonic)
    ended_s: float = 0.0  # time at which the engine ended it (monotonic); 0: not yet
    token_id: int | None = None
    is_claimed: bool = False  # the connector has recognised the prompt
    is_loaded: bool = False  # all ranks have loaded what the connector claimed
    is_unmatched: bool = False  # the connector did not recognise it; the engine computed all of it
    has_native: bool = False  # the engine has ended it, and `job.native` is set

    @property
    def is_known(self) -> bool:
        """True if the number of cached tokens is known, and that the loaded KV is right."""
        return (self.is_claimed and self.is_loaded) or self.is_unmatched

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        self.driver.computed(self, token_ids[0], logprobs[:1])

    def ended(self, outcome: Outcome) -> None:
        self.driver.ended(self, outcome)


class ConnectedPrefill(ConnectedDriver[PrefillWorker, PrefillJob]):
    def __init__(self, worker: PrefillConfig, use: EngineUse) -> None:
        self._tokens_ahead_max = STEPS_AHEAD * worker.chunk_tokens
        self._prompts: dict[PrefillJob, StagedPrompt] = {}
        self._step_began_s = self._step_ended_s = 0.0
        self._staging = threading.Lock()
        super().__init__(worker, use)

    def measure(self, budget_s: float) -> Samples:
        return measured_prefill(self.engine, budget_s)

    def check(self, job: PrefillJob) -> None:
        self._sampling(job)  # raises InvalidRequest now rather than after staging
        if self.is_native:
            job.put.decode_inbox = ""  # announce no blocks, because the engines hand KV over

    def has_room(self) -> bool:
        return self._tokens_ahead() < self._tokens_ahead_max

    def _tokens_ahead(self) -> int:
        """Tokens that the engine has or will get soon, and has not computed."""
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
        # The prediction is for all prompts together, because a single one may bring no report.
        predicted_s = self._worker.estimate.seconds(self._tokens_ahead(), 0)
        self._look_after(now_s, is_busy, predicted_s)
        late = self._late(now_s)
        return functools.partial(self._give_up, late) if late else None

    # -- a prompt goes to the engine

    def start(self, job: PrefillJob) -> None:
        """Stage, then submit, one prompt at a time.

        Of equal prompts, the first that the engine gets takes the first stage. In another order, a
        cancelled prompt would take the other's stage with it.
        """
        with self._staging:
            prompt = self._stage(job)
            order = self._order(job)
            worker = self._worker
            with worker.lock:
                worker.post(job, On.ENGINE_READY)
                if not job.is_leaving:
                    prompt.started_tokens = job.cached_tokens
                    prompt.given_s = time.monotonic()
                    prompt.running = self.engine.generate(order, prompt)

    def _stage(self, job: PrefillJob) -> StagedPrompt:
        put, salt, step = job.put, job.request.cache_salt, self.engine.handover_tokens
        whole_tokens = len(job.token_ids) // step * step  # decode computes the rest
        stop = blocks_touched(whole_tokens, self._block_tokens)
        unsaved = range(put.first_block, max(put.first_block, stop))
        prompt = StagedPrompt(self, job, whole_tokens, unsaved)
        if not job.is_leaving:
            self._take_slots(put, unsaved)
            places, uses = self._places.places(put.pages, put.first_block)
            with self._worker.lock:
                self._prompts[job] = prompt  # it must be unstaged even if staging fails
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
        """Take slots of the local node for the unsaved blocks. The engine saves KV into them."""
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
            native_params=self.engine.native_params(job.request_id, b"") if native else None,
            request_id=job.request_id,
        )

    def _sampling(self, job: PrefillJob) -> Any:
        """The engine's parameters for the one token after the prompt."""
        request, prompt = job.request, job.request.prompt_tokens
        return self.engine.sampling(request.sampling, len(job.token_ids) - prompt, 1, prompt)

    # -- reports: in the engine's thread, or in the channel's

    def _prompt_of(self, request_id: str) -> StagedPrompt | None:
        """None: the job has left. The caller holds the lock."""
        job = self._worker.jobs.get(request_id)
        return None if job is None else self._prompts.get(job)

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        with self._worker.lock:
            prompt = self._prompt_of(request_id)
            if prompt is None:
                return
            prompt.is_claimed = True
            prompt.is_loaded = prompt.is_loaded or not loaded_tokens
            if prompt.job.state.token_id is None:  # the message with the first token tells it
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

    def computed(
        self, prompt: StagedPrompt, token_id: int, logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
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
            job.logprobs = list(logprobs)  # before `token_id`: another thread may send both
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
            self.computed(prompt, job.request.sampling.end_ids[0])  # it withholds the end id
        elif prompt.token_id is None:
            if not job.is_leaving:
                error = WorkerUnavailable(f"the engine ended a prompt: {outcome.finish_reason}")
                self._failed(error)
                self._worker.fail(job, error)
            return
        # In this order, because another thread may answer after the second line.
        job.native = outcome.native
        prompt.has_native = True
        self._go_on(prompt)

    def saved(self, request_id: str, tokens: int) -> None:
        """All ranks have copied the KV of so many leading tokens into its places."""
        with self._worker.lock:
            prompt = self._prompt_of(request_id)
            if prompt is None:
                return
            job, unsaved = prompt.job, prompt.unsaved
            done = unsaved.stop if tokens >= prompt.whole_tokens else tokens // self._block_tokens
            new = range(unsaved.start, max(unsaved.start, done))
            prompt.unsaved = range(new.stop, unsaved.stop)
            if new:  # under the lock, so that the reply follows it in the writer's queue
                self._worker.writer.put_whole(job.put, new, is_handover=not self.is_native)
                self._worker.settle_behind(job, new)
        self._go_on(prompt)

    def _go_on(self, prompt: StagedPrompt) -> None:
        """Post the events whose conditions hold by now. If they were posted before, they have no
        effect. Under the lock, so that two threads post them in order."""
        worker, job = self._worker, prompt.job
        with worker.lock:
            if prompt.token_id is None or job.is_leaving or not prompt.is_known:
                return
            worker.post(job, On.SAMPLED, prompt.token_id)
            if not (prompt.has_native if self.is_native else not prompt.unsaved):
                return
            self._health.went_well()
            if self.is_native:
                worker.post(job, On.ANSWERABLE)
            if not prompt.unsaved:
                worker.post(job, On.COMPUTED)

    # -- prompts without further reports

    def _late(self, now_s: float) -> list[StagedPrompt]:
        """Prompts that have ended, but whose KV does not come. The caller holds the lock."""
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
        """Reply without blocks, because the stage was never matched. For example, a release may not
        tell connectors of salts. The token is right, and decode computes the prompt again."""
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
            self._worker.post(job, On.ENGINE_LEFT, is_certain)

        prompt = self._prompts.pop(job, None)
        if prompt is None:  # never staged
            left()
            return
        if prompt.running is not None:
            prompt.running.abort()
        self._staged.give_back(job.request_id, job.pages_left, left)
