"""Decode on a connected engine: it gets handed-over KV, batches, and decodes.

KV is read while prefill computes, as for the torch engine. Blocks of the local node stay there; the
others are read into pages of the staging pool. When all blocks are there, the request is staged and
submitted as the prompt and its first token. The engine copies whole pages of its own from there,
and computes the few remaining tokens. Blocks that it fills come back into pages of the pool that
the request has reserved, and go to the store. An ended request keeps its pages until its last block
came back, or for LAST_BLOCK_S_MAX.

If the engine gets KV from the prefill engine by itself, there is no connector, and generated blocks
do not go to the store.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from backends.config_pbtxt import DecodeConfig
from backends.engine.connected.generation import EngineRun, Order, Outcome
from backends.engine.connected.measuring import measured_decode
from backends.engine.connected.messages import Stage
from backends.errors import WorkerUnavailable
from backends.token_logprobs import TokenLogprobs
from backends.workers.connected.driver import UNCLAIMED_S_MAX, ConnectedDriver, EngineUse
from backends.workers.decode_worker import DecodeWorker
from backends.workers.driver import DecodeDriver, Samples
from backends.workers.jobs import DecodeJob
from backends.workers.kv_writer import JobEvent
from backends.workers.lifecycle.events import On
from mooncake_store.block_keys import block_keys, chain_seed, packed_tokens
from mooncake_store.layout import blocks_touched

ENDS_WELL = ("length", "end_id", "stop_word")
# The block that the last step filled may not come any more.
LAST_BLOCK_S_MAX = 1.0


class NewTokens(NamedTuple):
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs]  # of each token; (): not wanted


@dataclass(slots=True, eq=False)
class EngineAnswer:
    """One request at the engine, until its pages are given back. The sink of its generation.

    If the engine copies KV out of slots of the storage node, another request may get the slots
    during the copy. So tokens and the end of the generation are held until `is_believed`.
    """

    driver: ConnectedDecode
    job: DecodeJob
    running: EngineRun | None = None
    is_staged: bool = False
    is_claimed: bool = False  # the connector has recognised the request
    is_believed: bool = False  # all of its KV is verified; only changed in the engine's thread
    held: list[NewTokens | Outcome] = field(default_factory=list)  # tokens, last perhaps the end
    held_s: float = 0.0  # time at which the first of `held` came (monotonic); 0: none is held
    ended_s: float = 0.0  # time at which the job left its worker (monotonic); 0: not yet

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        self._take(NewTokens(token_ids, logprobs))

    def ended(self, outcome: Outcome) -> None:
        if outcome.error is None:
            self._take(outcome)
        else:  # an error is not held, because the engine may never report the load
            self.held, self.held_s = [], 0.0
            self.driver.ended(self.job, outcome)

    def _take(self, news: NewTokens | Outcome) -> None:
        self.is_believed = self.is_believed or self.driver.has_read(self.job)
        if self.is_believed and not self.held:
            self._carry_out(news)
        else:
            self.held_s = self.held_s or time.monotonic()
            self.held.append(news)

    def believe(self) -> None:
        """Carry out what was held. Runs in the engine's thread."""
        self.is_believed = True
        held, self.held, self.held_s = self.held, [], 0.0
        for news in held:
            self._carry_out(news)

    def fail(self, error: Exception) -> None:
        """Drop what was held. Runs in the engine's thread."""
        if self.held:
            self.held, self.held_s = [], 0.0
            self.driver.fail(self.job, error)

    def _carry_out(self, news: NewTokens | Outcome) -> None:
        if isinstance(news, Outcome):
            self.driver.ended(self.job, news)
        else:
            self.driver.decoded(self.job, *news)


class ConnectedDecode(
    ConnectedDriver[DecodeWorker, DecodeJob], DecodeDriver[DecodeWorker, DecodeJob]
):
    def __init__(self, worker: DecodeConfig, use: EngineUse) -> None:
        self._answers: dict[DecodeJob, EngineAnswer] = {}
        self._staged_jobs: dict[str, DecodeJob] = {}  # also jobs that have left, until `_let_go`
        self._has_news = False
        super().__init__(worker, use)

    def measure(self, budget_s: float) -> Samples:
        return measured_decode(self.engine, budget_s)

    def check(self, job: DecodeJob) -> None:
        if bool(job.request.native) != self.is_native:
            handoff = "native" if self.is_native else "store"
            raise WorkerUnavailable(
                f"{self._worker.process.worker_id} has handoff {handoff}, the prefill worker has "
                "another; give all workers the same"
            )

    def blocks_due(self, handed_over: int, kv_tokens: int) -> int:
        """The blocks of what is handed over; the engine computes the tokens after that. Without
        blocks it computes the prompt."""
        if self.is_native or not handed_over:
            return 0
        step = self.engine.handover_tokens
        return blocks_touched(kv_tokens // step * step, self._block_tokens)

    def next_step(self, now_s: float) -> Callable[[], None] | None:
        worker = self._worker
        if not worker.jobs:
            worker.process.steps.batch_is_empty()
        self._let_go(now_s)
        self._look_at_held(now_s)
        running = sum(
            answer.running is not None and not answer.job.has_left
            for answer in self._answers.values()
        )
        predicted_s = worker.estimate.step_s(running, worker.batching.context_tokens)
        self._look_after(now_s, bool(running), predicted_s)
        return None

    def _estimated_s(self) -> float:
        batching = self._worker.batching
        return self._worker.estimate.step_s(batching.running, batching.context_tokens)

    # -- a request goes to the engine

    def start(self, job: DecodeJob) -> None:
        """Stage, then submit."""
        answer = EngineAnswer(self, job)
        with self._worker.lock:
            self._answers[job] = answer
        if not job.is_leaving and not self.is_native:
            self._stage(answer)
        order = self._order(job)
        with self._worker.lock:
            self._worker.post(job, On.ENGINE_READY)
            if not job.is_leaving:
                answer.running = self.engine.generate(order, answer)

    def _stage(self, answer: EngineAnswer) -> None:
        job, step = answer.job, self.engine.handover_tokens
        ids, salt = np.asarray(job.token_ids), job.request.cache_salt
        seed = chain_seed(self._worker.process.fingerprint, cache_salt=salt)
        kv_tokens = len(ids) - 1  # the newest token has no KV
        loaded_tokens = kv_tokens // step * step if job.request.blocks else 0
        places, uses = self._places.places(job.pages, loaded_tokens // self._block_tokens)
        with self._worker.lock:
            answer.is_staged = True
            self._staged_jobs[job.request_id] = job
        self._staged.stage(
            Stage(
                job.request_id,
                bytes(packed_tokens(ids)),
                salt,
                seed,
                block_keys(ids, self._block_tokens, seed),
                places,
                loaded_tokens,
                uses,
                is_decode=True,
            )
        )

    def _order(self, job: DecodeJob) -> Order:
        sampling, done = job.request.sampling, len(job.output_ids)
        prompt, salt = job.request.prompt_tokens, job.request.cache_salt
        if self.is_native:  # the engine generates the first token again, so it counts
            params = self.engine.native_params(job.request_id, job.request.native)
            left = sampling.max_tokens - done + 1
            wanted = self.engine.sampling(sampling, done - 1, left, prompt)
            return Order(job.token_ids[:-1], wanted, salt, True, params, job.request_id)
        wanted = self.engine.sampling(sampling, done, sampling.max_tokens - done, prompt)
        return Order(list(job.token_ids), wanted, salt, request_id=job.request_id)

    # -- reports: in the engine's thread, or in the channel's

    def decoded(
        self, job: DecodeJob, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
        self._worker.process.watch.progressed(time.monotonic())
        if not logprobs:
            self._worker.decoded([(job, token_ids)])
        for token_id, its in zip(token_ids if logprobs else (), logprobs, strict=True):
            if not job.finish_reason:  # one by one: a stop word may end the answer between them
                job.drawn_logprobs.append(its)
                self._worker.decoded([(job, [token_id])])
        if job.finish_reason:
            self._health.went_well()
        if not self._has_news:
            self._has_news = True
            self.engine.llm.soon(self._send_news)

    def _send_news(self) -> None:
        """Send what this turn of the engine's thread brought."""
        self._has_news = False
        self._worker.send_news()

    def ended(self, job: DecodeJob, outcome: Outcome) -> None:
        if job.finish_reason or job.has_left:
            return  # this worker saw the end before the engine did
        if outcome.error is not None:
            self.fail(job, outcome.error)
        elif outcome.finish_reason == "stop":  # some releases withhold the end id
            self.decoded(job, list(job.request.sampling.end_ids[:1]))
            if not job.finish_reason:
                error = WorkerUnavailable("the engine stopped without an end id")
                self._worker.fail(job, error)
        elif not job.is_leaving:
            reason = f"the engine ended it after {len(job.output_ids)} tokens: "
            self.fail(job, WorkerUnavailable(reason + outcome.finish_reason))

    def has_read(self, job: DecodeJob) -> bool:
        return self._placed is None or not self._placed.is_in_slots(job.pages)

    def loaded(self, request_id: str) -> None:
        with self._worker.lock:
            job = self._staged_jobs.get(request_id)
        if job is None or self.has_read(job):
            return
        self._places.forget(job.pages)
        if (answer := self._answers.get(job)) is not None:
            self.engine.llm.post(answer.believe)
        self._worker.writer.mark(JobEvent(job, On.KV_READ))

    def _look_at_held(self, now_s: float) -> None:
        """Believe a request that the connector did not recognise: nothing is loaded for it. Fail a
        request whose claimed load does not end. The caller holds the lock."""
        for answer in self._answers.values():
            waited_s = now_s - answer.held_s if answer.held_s else 0.0
            if not answer.is_claimed and waited_s > UNCLAIMED_S_MAX:
                self.engine.llm.post(answer.believe)
            elif waited_s > self._transfer_s_max:
                error = WorkerUnavailable(
                    f"the engine did not load KV within {self._transfer_s_max:g} s"
                )
                self.engine.llm.post(functools.partial(answer.fail, error))

    def fail(self, job: DecodeJob, error: Exception) -> None:
        self._failed(error)
        self._worker.fail(job, error)

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        with self._worker.lock:
            job = self._staged_jobs.get(request_id)
            if job is None:
                return
            if (answer := self._answers.get(job)) is not None:
                answer.is_claimed = True
        if not loaded_tokens:  # the engine had all of the handed-over KV
            self.loaded(request_id)
        paths = {"loaded": loaded_tokens, "local": local_tokens}
        paths["computed"] = job.tokens_given - loaded_tokens - local_tokens
        for path, tokens in paths.items():
            if tokens > 0:
                self._worker.process.observations.observe(
                    "mooncake_handover_tokens_total", tokens, path=path
                )

    def saved(self, request_id: str, tokens: int) -> None:
        """All ranks have copied the KV of so many leading tokens into its places."""
        with self._worker.lock:
            job = self._staged_jobs.get(request_id)
            if job is not None:
                job.saved_blocks = max(job.saved_blocks, tokens // self._block_tokens)
                self._worker.put_saved(job)
                self._worker.lock.notify_all()

    # -- leaving

    def leave(self, job: DecodeJob) -> None:
        answer = self._answers.get(job)
        # The engine does not know of an end by a stop word, so the request is still running there.
        has_ended = job.finish_reason in ("length", "end_id")
        if answer is not None and answer.running is not None and not has_ended:
            answer.running.abort()
        if answer is None or not answer.is_staged:
            self._answers.pop(job, None)
            self._worker.post(job, On.ENGINE_LEFT, True)
            return
        answer.ended_s = time.monotonic()
        if job.finish_reason not in ENDS_WELL or self._worker.process.is_lost:
            job.filled.clear()

    def _let_go(self, now_s: float) -> None:
        """Give back the pages of ended requests whose blocks have all come, or come too late. The
        caller holds the lock."""
        over = [
            answer.job
            for answer in self._answers.values()
            if answer.ended_s
            and (not answer.job.filled or now_s - answer.ended_s > LAST_BLOCK_S_MAX)
        ]
        for job in over:
            del self._answers[job]
            if self._staged_jobs.get(job.request_id) is job:
                del self._staged_jobs[job.request_id]

            def left(is_certain: bool, job: DecodeJob = job) -> None:
                self._worker.post(job, On.ENGINE_LEFT, is_certain)

            self._staged.give_back(job.request_id, job.pages_left, left)
