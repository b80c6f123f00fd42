"""Drivers of an engine that computes step by step: the torch engine.

The engine's thread takes the next step from the batching, computes it, and reports the results.
Between two steps the engine runs nothing, so a request can leave without an abort.

Not here: which requests share a step (engine/batching/batching.py), the effects of a token on its
request (prefill_worker.py, decode_worker.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from backends.config_pbtxt import WorkerConfig, checkpoint_folder
from backends.engine import calibration
from backends.engine.batching.batching import Chunk
from backends.engine.interface import Engine, LayerEngine, Work
from backends.engine.sampling import draw, largest_rows
from backends.workers.decode_worker import DecodeWorker
from backends.workers.driver import DecodeDriver, Driver, Samples
from backends.workers.jobs import DecodeJob, LayeredJob, PrefillJob
from backends.workers.lifecycle.events import On
from backends.workers.prefill_worker import LayerStored, PrefillWorker
from backends.workers.protocol import CopyToken
from backends.workers.worker import JobWorker
from mooncake_store.layout import blocks_touched

if TYPE_CHECKING:
    from backends.engine.torch.torch_engine import TorchEngine

log = logging.getLogger(__name__)
# Points at which the speed is measured. PREFILL_POINTS: (new tokens, context tokens before them).
# DECODE_POINTS: (sequences, context tokens of each).
PREFILL_POINTS = ((16, 0), (64, 0), (256, 0), (512, 0), (64, 1024), (256, 1024), (512, 2048))
DECODE_POINTS = ((1, 64), (1, 1024), (4, 512), (8, 256), (16, 256))
# If a step completes more block bytes than this, each layer is copied during the step. Otherwise
# all layers are copied after the step. Copying 512 KiB takes only 0.2 ms. Waking the writer for
# each layer made a step of 6 ms longer by 1.2 ms, and its tokens later (two cores of an EPYC).
WHOLE_BYTES_MAX = 512 * 1024

J = TypeVar("J", PrefillJob, DecodeJob)


def load_engine(config: WorkerConfig, repository: str) -> TorchEngine:
    """Load the engine. A pipeline stage loads weights and allocates pages of its layers only."""
    from backends.engine.torch.torch_engine import TorchEngine

    engine = TorchEngine.load(
        checkpoint_folder(config.checkpoint, repository),
        pages_max=config.pages_max,
        block_tokens=config.block_tokens,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        stage=config.pipeline_stage,
        stages=config.pipeline_stages,
        kv_dtype=config.kv_dtype,
    )
    with contextlib.suppress(AttributeError):  # another libc than glibc
        ctypes.CDLL(None).malloc_trim(0)  # return the buffers of loading: 30 MiB with 135M weights
    return engine


def take_step(
    worker: JobWorker[J], jobs: Sequence[J], predicted_s: float, step: Callable[[], None]
) -> None:
    """Run one step. `StepWatch` watches it, because a hung step must end the process.

    An exception fails the jobs of the step.
    """
    watch = worker.process.watch
    watch.began(time.monotonic(), predicted_s)
    try:
        step()
    except Exception as error:  # Catch all: only the requests fail
        log.exception("a step of %s failed", worker.process.worker_id)
        for job in jobs:
            worker.fail(job, error)
    finally:
        watch.ended()


class StepPrefill(Driver[PrefillWorker, PrefillJob]):
    engine: Engine
    draws_by_guide = True

    def __init__(self, engine: Engine, whole_bytes_max: int = WHOLE_BYTES_MAX) -> None:
        self.engine = engine
        self.rings = engine.rings
        self._whole_bytes_max = whole_bytes_max
        self._block_tokens = engine.layout.block_tokens

    def measure(self, budget_s: float) -> Samples:
        return self._measure(self.engine, budget_s)

    def _measure(self, engine: Engine, budget_s: float) -> Samples:
        longest = engine.context_tokens_max
        points = [(new, before) for new, before in PREFILL_POINTS if new + before <= longest]
        return calibration.measure_prefill(engine, points, budget_s)

    def start(self, job: PrefillJob) -> On | None:
        return On.ENGINE_READY

    def next_step(self, now_s: float) -> Callable[[], None] | None:
        worker = self._worker
        chunks = worker.batching.next_step()
        if not chunks:
            return None
        jobs = [worker.jobs[chunk.request_id] for chunk in chunks]
        predicted_s = sum(worker.estimate.seconds(chunk.tokens, chunk.start) for chunk in chunks)
        layers = jobs[0].layers
        if layers is not None:
            predicted_s /= self.engine.layout.layers
            step = functools.partial(self._layer_step, chunks, jobs[0], layers)
            return functools.partial(take_step, worker, jobs[:1], predicted_s, step)
        step = functools.partial(self._step, chunks, jobs)
        return functools.partial(take_step, worker, jobs, predicted_s, step)

    def _layer_step(self, chunks: Sequence[Chunk], job: PrefillJob, layers: LayeredJob) -> None:
        """Compute chunks of one layer-wise prompt. Each chunk covers tokens of one layer."""
        worker, started_s = self._worker, time.monotonic()
        if layers.computing is None:
            assert job.put.rings is not None, job.request_id
            layers.computing = cast(LayerEngine, self.engine).begin_pass(
                job.token_ids.tolist(), chunks[0].start, job.put.rings.numbers, job.scores
            )
        logits = None
        for chunk in chunks:
            logits = layers.computing.compute(chunk.layer, chunk.start, chunk.tokens)
            if blocks := self._blocks_finished(chunk, job):
                worker.writer.layer_done(job.put, blocks, chunk.layer)
            if chunk.is_last:
                worker.writer.mark(LayerStored(job))
            layers.computed_parts += chunk.tokens
        step_s = time.monotonic() - started_s
        worker.process.steps.took(step_s)
        with worker.lock:
            is_over = bool(worker.batching.computed(chunks))
        if job.computing_from_s is None:
            job.computing_from_s = started_s
        job.compute_s += step_s
        job.computed_tokens = layers.computed_parts // self.engine.layout.layers
        if is_over:
            assert logits is not None, f"{job.request_id} has no logits after its last layer"
            layers.computing = None
            self._sample(job, logits)
            worker.writer.blocks_done(job.put, job.put.unstored_blocks())
            worker.settle_behind(job, range(len(job.put.keys)))
            worker.post(job, On.COMPUTED)

    def _step(self, chunks: Sequence[Chunk], jobs: Sequence[PrefillJob]) -> None:
        worker, started_s = self._worker, time.monotonic()
        batch, finished, on_layer = self._prepare(chunks, jobs)
        blocks = sum(len(each) for each in finished)
        is_whole = blocks * self.engine.layout.block_bytes <= self._whole_bytes_max
        logits = self.engine.forward(batch, None if is_whole else on_layer)
        step_s = time.monotonic() - started_s
        worker.process.steps.took(step_s)
        with worker.lock:
            worker.batching.computed(chunks)
        for row, (chunk, job) in enumerate(zip(chunks, jobs, strict=True)):
            if job.computing_from_s is None:
                job.computing_from_s = started_s
            job.compute_s += step_s
            job.computed_tokens += chunk.tokens
            if chunk.is_last:
                self._sample(job, logits[row])
        # Queue writes after the first tokens are sent, because the writer competes for the GIL.
        for job, blocks, chunk in zip(jobs, finished, chunks, strict=True):
            if blocks and is_whole:
                worker.writer.put_whole(job.put, blocks, is_handover=True)
            elif blocks:
                worker.writer.blocks_done(job.put, blocks)
            if blocks:
                worker.settle_behind(job, blocks)
            if chunk.is_last:
                worker.post(job, On.COMPUTED)

    def _sample(self, job: PrefillJob, logits: np.ndarray) -> None:
        """Sample the first token of a computed prompt. If sampling fails, the job fails."""
        prompt = job.token_ids[: job.request.prompt_tokens].tolist()
        output = job.given_output_ids()
        answers = [job.request.sampling.of_answer(i) for i in range(1 + len(job.request.copies))]
        try:
            guides = [job.guide, *(job.guide and job.guide.copy() for _ in job.request.copies)]
            drawn, *others = [
                draw(logits, params, len(output), prompt, output, guide)
                for params, guide in zip(answers, guides, strict=True)
            ]
        except Exception as error:  # Catch all: a request must not fail the batch
            self._worker.fail(job, error)
            return
        job.logprobs = [drawn.logprobs] if drawn.logprobs is not None else []
        job.copies = [
            CopyToken(other.token_id, [other.logprobs] if other.logprobs is not None else [])
            for other in others
        ]
        job.computed_at_s = time.monotonic()
        self._worker.post(job, On.SAMPLED, drawn.token_id)

    def _prepare(
        self, chunks: Sequence[Chunk], jobs: Sequence[PrefillJob]
    ) -> tuple[list[Work], list[range], Callable[[int], None]]:
        """(batch, blocks that each chunk completes, callback that queues a layer's copy)."""
        batch = [
            Work(
                job.token_ids[c.start : c.start + c.tokens].tolist(),
                c.start,
                job.put.pages,
                job.scores,
            )
            for c, job in zip(chunks, jobs, strict=True)
        ]
        finished = [self._blocks_finished(c, job) for c, job in zip(chunks, jobs, strict=True)]

        def on_layer(layer: int) -> None:
            for job, blocks in zip(jobs, finished, strict=True):
                if blocks:
                    self._worker.writer.layer_done(job.put, blocks, layer)

        return batch, finished, on_layer

    def _blocks_finished(self, chunk: Chunk, job: PrefillJob) -> range:
        """Blocks that this chunk completes and that the store lacks; the last may be partial."""
        end = chunk.start + chunk.tokens
        stop = (
            blocks_touched(end, self._block_tokens) if chunk.is_last else end // self._block_tokens
        )
        return range(max(job.put.first_block, chunk.start // self._block_tokens), stop)

    def leave(self, job: PrefillJob) -> None:
        self._worker.post(job, On.ENGINE_LEFT, True)


class StepDecode(DecodeDriver[DecodeWorker, DecodeJob]):
    engine: Engine
    can_preempt = True
    draws_by_guide = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def measure(self, budget_s: float) -> Samples:
        return calibration.measure_decode(self.engine, list(DECODE_POINTS), budget_s)

    def blocks_due(self, handed_over: int, kv_tokens: int) -> int:
        return blocks_touched(kv_tokens, self.engine.layout.block_tokens)

    def start(self, job: DecodeJob) -> On | None:
        # After a step the KV of its tokens is in the pages, so every full block may be written.
        job.saved_blocks = sys.maxsize
        return On.ENGINE_READY

    def next_step(self, now_s: float) -> Callable[[], None] | None:
        worker = self._worker
        jobs = [worker.jobs[request_id] for request_id in worker.batching.next_step()]
        if not jobs:
            worker.process.steps.batch_is_empty()
            return None
        predicted_s = worker.estimate.step_s(len(jobs), worker.batching.context_tokens)
        return functools.partial(
            take_step, worker, jobs, predicted_s, functools.partial(self._step, jobs)
        )

    def _step(self, jobs: Sequence[DecodeJob]) -> None:
        worker, started_s = self._worker, time.monotonic()
        batch = [Work([job.token_ids[-1]], len(job.token_ids) - 1, job.pages) for job in jobs]
        logits = self.engine.forward(batch)
        worker.decoded(self._drawn(jobs, logits))
        estimated_s = worker.estimate.step_s(len(batch), sum(work.end for work in batch))
        worker.process.steps.took(time.monotonic() - started_s, estimated_s)
        worker.send_news()

    def _drawn(
        self, jobs: Sequence[DecodeJob], logits: np.ndarray
    ) -> list[tuple[DecodeJob, Sequence[int]]]:
        """Sample each job's next token from logits [jobs, vocabulary]. Omits jobs that fail."""
        asked = [(job.request.sampling, len(job.output_ids), job.guide) for job in jobs]
        if (largest := largest_rows(logits, asked)) is not None:
            return [(job, (token_id,)) for job, token_id in zip(jobs, largest, strict=True)]
        tokens_of: list[tuple[DecodeJob, Sequence[int]]] = []
        for row, job in enumerate(jobs):
            try:
                drawn = draw(
                    logits[row],
                    job.request.sampling,
                    len(job.output_ids),
                    job.prompt_ids,
                    job.output_ids,
                    job.guide,
                )
                if drawn.logprobs is not None:
                    job.drawn_logprobs.append(drawn.logprobs)
                tokens_of.append((job, (drawn.token_id,)))
            except Exception as error:  # Catch all: a request must not fail the batch
                self._worker.fail(job, error)
        return tokens_of

    def leave(self, job: DecodeJob) -> None:
        self._worker.post(job, On.ENGINE_LEFT, True)
