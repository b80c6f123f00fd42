"""The prefill worker: computes prompts, writes their KV to the store, and samples one token each.

A prompt waits for pages. A loader then finds its cached prefix, fetches what other nodes have, and
loads it into the pages (prefix_loading.py). The driver computes the other tokens, together with
other prompts. During the computation, the writer (kv_writer.py) copies the KV to the store. The
worker replies after the last block is committed; if engines hand KV over by themselves, before.
lifecycle/prefill.py decides this order. The methods here are in the same order.

Threads: the engine's thread runs the engine loop (worker.py), and posts the results of its steps.
Loaders read KV and start jobs, others compile grammars. The writer stores KV and sends replies. An
engine with a process of its own posts results in threads of its own.

Layer-wise prefill: with `layerwise` on, a prompt longer than a step is computed layer by layer.
Exception: a short, mostly cached prompt is computed in chunks (engine/batching/batching.py). While
a layer is computed, a loader reads the cached prefix's next layer into layer ring buffers, which
have room for three layers of each block (engine/batching/layer_passes.py). The layer may come from
a remote node, and is then also written to the local node. If a block is missing, the prompt starts
again, and its prefix is first fetched to the local node.

A prompt whose logprobs are wanted is computed from its first token. Cached blocks are not loaded,
but the decode worker gets them, and only the other blocks are stored.

Not here: Triton's API (prefill/model.py), steps and engines (step_driver.py, connected/prefill.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from backends.config_pbtxt import PrefillConfig
from backends.engine.batching.batching import PrefillBatching
from backends.engine.batching.layer_passes import LayerRings
from backends.engine.interface import LayerEngine
from backends.errors import Cancelled
from backends.token_logprobs import PromptScores
from backends.workers.driver import Driver
from backends.workers.jobs import LayeredJob, PrefillClient, PrefillJob
from backends.workers.kv_writer import BlockPut
from backends.workers.lasting_parts import LastingParts
from backends.workers.lifecycle.events import Do, On
from backends.workers.lifecycle.prefill import step
from backends.workers.lifecycle.states import JobPhase, JobState
from backends.workers.prefix_loading import (
    Fetching,
    FoundPrefix,
    LayeredPrefix,
    LoadedPrefix,
    PrefixLoading,
    SingleFlight,
)
from backends.workers.protocol import BlockRef, PrefillRequest
from backends.workers.worker import Actions, JobWorker
from conductor.estimates.estimates import PrefillEstimate
from mooncake_store.block_keys import block_keys, chain_seed, tenant_of
from mooncake_store.errors import StoreError
from mooncake_store.layout import blocks_touched
from mooncake_store.records.membership import WorkerReport

# After this many layer-wise attempts with its cached prefix, a prompt is computed without it.
TRACED_MAX = 3
log = logging.getLogger(__name__)


class BlocksStored(NamedTuple):
    """A mark in the writer's queue: the job no longer produces these blocks."""

    job: PrefillJob
    keys: Sequence[bytes] | None  # None: all its blocks


class LayerStored(NamedTuple):
    """A mark in the writer's queue: one more layer of the layer-wise job is stored."""

    job: PrefillJob


class PrefillWorker(JobWorker[PrefillJob]):
    role = "prefill"
    step = staticmethod(step)
    loaders = 2
    batching: PrefillBatching

    def __init__(
        self,
        worker_id: str,
        config: PrefillConfig,
        repository: str,
        driver: Driver[PrefillWorker, PrefillJob],
        parts: LastingParts | None = None,
    ) -> None:
        super().__init__(worker_id, config, repository, config.queue_requests_max, driver, parts)
        self.config = config
        self.driver: Driver[PrefillWorker, PrefillJob] = driver
        self._single_flight = SingleFlight()
        self._blocked: list[PrefillJob] = []  # each waits for a block that another prompt produces
        self._nodes_read: set[str] = set()  # nodes from which a layer is being loaded
        store = self.process.store
        store.expect_threads(self.loaders)
        self._rings = self.process.rings
        self.estimate = PrefillEstimate.of(self.process.info.prefill_coefficients)
        self.batching = PrefillBatching(
            driver.engine.pages,
            config.block_tokens,
            config.chunk_tokens,
            slots_max=driver.engine.pages.pages_max,  # no further limit: a prompt takes a page
            waiting_max=config.queue_requests_max,
            overhead_tokens=self.estimate.overhead_tokens,
            rings=self._rings,
        )
        self._prefixes = PrefixLoading(
            store,
            self._loader.load_copies,
            config.store_node,
            config.lease_s,
            config.transfer_s_max,
        )
        driver.begin(self)
        self._serve()

    def _actions_of_role(self) -> Actions[PrefillJob]:
        """In the order of a prompt's life."""
        return {
            Do.JOIN: self._join,
            Do.READ_LAYER: lambda job: self._loading.submit(self._bring_layer, job),
            Do.LAYER_LOADED: lambda job: self.batching.layer_loaded(job.request_id),
            Do.STOP_BATCH: self._stop_batch,
            Do.GIVE_UP_SLOTS: lambda job: self.writer.begin_again(job.put),
            Do.SEND_FIRST: self._send_first,
            Do.REPLY: self._reply,
            Do.SETTLE: lambda job: self.writer.mark(BlocksStored(job, None)),
            Do.END_WRITES: PrefillJob.end_writes,
            Do.FREE_SLOTS: lambda job: self.writer.free_unfilled(job.put),
            Do.RELEASE_LEASES: lambda job: self.process.owners.release(job.request_id),
            Do.FAIL: self._fail,
        }

    # -- a prompt arrives, and waits for pages

    def submit(self, request: PrefillRequest, ids: np.ndarray, client: PrefillClient) -> None:
        """Queue a prompt. `client` gets the reply in another thread. Raises ServingError."""
        self.process.call_limits.check(request, ids)
        seed = chain_seed(self.process.fingerprint, cache_salt=request.cache_salt)
        put = BlockPut(
            request.request_id,
            len(ids),
            [],
            block_keys(ids, self.config.block_tokens, seed),
            first_block=0,
            decode_inbox=request.decode_inbox,
            reserve_tokens=request.reserve_tokens,
            tenant=tenant_of(request.cache_salt),
        )
        now_s = time.monotonic()
        job = PrefillJob(
            request=request,
            client=client,
            submitted_s=now_s,
            token_ids=ids.astype(np.int32),
            put=put,
            scores=self._scores(request, ids),
        )
        job.state = JobState(
            needs_grammar=self._needs_grammar(job),
            keeps_leases=bool(request.decode_inbox) and not self.driver.is_native,
        )
        with self.lock:
            # Under the lock, so that an engine failure after this check also fails this job.
            self.driver.check(job)
            self._refuse(job)
            key_s = now_s + request.place_s
            local_tokens = request.near_blocks * self.config.block_tokens
            if not self.batching.add(
                request.request_id, len(ids), key_s, request.is_resumed, local_tokens
            ):
                raise self._queue_full("prompts")
            job.queue_ahead = self.batching.ahead(request.request_id)
            self._add(job)
            self._admit()  # now, so that the prefix is loaded during the current step

    def _scores(self, request: PrefillRequest, ids: np.ndarray) -> PromptScores | None:
        if not request.sampling.scores_prompt:
            return None
        top = min(request.sampling.prompt_logprobs, self.driver.engine.vocabulary_tokens)
        return PromptScores(ids[: request.prompt_tokens].astype(np.int32), top)

    def _admit(self) -> None:
        while self.driver.has_room():
            admitted = self.batching.admit(at_most=1)
            if not admitted:
                return
            job = self.jobs[admitted[0].request_id]
            job.put.pages = admitted[0].pages
            if self._rings is not None and self.batching.is_layerwise(job.request_id):
                blocks = blocks_touched(len(job.token_ids), self.config.block_tokens)
                numbers = self._rings.in_pages(job.put.pages, blocks)
                layer_bytes = self.driver.engine.layout.layer_bytes
                job.put.rings = LayerRings(self._rings, layer_bytes, numbers)
                job.layers = LayeredJob()
            self.post(job, On.PAGES_GIVEN)

    # -- a loader brings its cached prefix

    def _load(self, job: PrefillJob) -> On | None:
        """Load the cached prefix, or locate it for layer-wise prefill. Runs in a loader's thread.
        None: the job is blocked by another prompt."""
        job.loading_from_s = started_s = time.monotonic()
        self.process.owners.hold(job.request_id, started_s, job.put.keys)
        if not job.is_leaving and not self._load_prefix(job):
            return None
        job.load_s = time.monotonic() - started_s
        return On.LOADED

    def _load_prefix(self, job: PrefillJob) -> bool:
        put = job.put
        found = self._prefixes.find(put.keys, job.request_id)
        if not self._leads(job, put.keys[len(found.local) :]):
            return False
        allowed = Fetching(job.request.fetch_blocks, tuple(job.request.fetch_nodes))
        prefix: LoadedPrefix
        if job.scores is not None:  # nothing is loaded, but the decode worker gets these blocks
            prefix = LoadedPrefix(found.local, 0, {})
        elif job.layers is None:
            prefix = self._prefixes.load(put.keys, found, put.pages, allowed, job.request_id)
        else:
            prefix = self._traced_prefix(job, job.layers, found, allowed)
        self._loader.refuse_late(put.pages)
        put.first_block = blocks = len(prefix.copies)
        put.refs = {
            i: BlockRef(i, *copy[:4])
            for i, copy in enumerate(prefix.copies)
            if copy.node_id == self.config.store_node
        }
        job.fetched_blocks, job.fetched_from = prefix.fetched_blocks, prefix.fetched_from
        if job.scores is None:
            # The last token is always computed, because its logits are needed for sampling.
            job.cached_tokens = min(blocks * self.config.block_tokens, len(job.token_ids) - 1)
            if job.layers is None:
                self.driver.engine.import_pages(put.pages[:blocks])
        self.writer.announce_cached(put)
        self._settle(job, [put.keys[block] for block in put.refs])
        return True

    def _leads(self, job: PrefillJob, missing: Sequence[bytes]) -> bool:
        """True if this prompt is to produce its missing blocks. False: it is blocked."""
        with self.lock:
            if self._single_flight.lead(missing, job.request_id):
                return True
            if self._overtakes(job, missing[0]):
                return True
            self.post(job, On.BLOCKED)
            self._blocked.append(job)
            return False

    def _overtakes(self, job: PrefillJob, key: bytes) -> bool:
        """True if a layer-wise prompt produces the block, and is after this job in queue order.

        A layer-wise prompt completes its blocks only with its last layer. Computing the block a
        second time is faster than waiting for the last layer. The caller holds the lock.
        """
        leader = self.jobs.get(self._single_flight.owner_of(key) or "")
        if leader is None or leader.layers is None:
            return False
        return self.batching.goes_before(job.request_id, leader.request_id)

    def _settle(self, job: PrefillJob, keys: Sequence[bytes] | None) -> None:
        """Record that the job no longer produces these blocks (None: all its blocks), because they
        are stored or abandoned. Then retry the blocked prompts."""
        with self.lock:
            self._single_flight.settle(keys, job.request_id)
            blocked, self._blocked = self._blocked, []
            for other in blocked:
                self.post(other, On.UNBLOCKED)

    # -- the driver computes it (step_driver.py, connected/prefill.py)

    def _join(self, job: PrefillJob) -> None:
        prefix = job.layers.prefix if job.layers is not None else None
        is_loaded = prefix is None or not prefix.copies
        self.batching.start(job.request_id, job.cached_tokens, is_loaded)
        self._load_layers_soon()
        self.lock.notify_all()

    def _send_first(self, job: PrefillJob) -> None:
        assert job.state.token_id is not None
        if message := job.first_token(job.state.token_id):
            self.process.outbox.send(job.request.reply_inbox, message)

    def settle_behind(self, job: PrefillJob, blocks: range) -> None:
        """Record that these blocks are stored, after the writer's queued tasks."""
        keys = job.put.keys[blocks.start : blocks.stop]
        self.writer.mark(BlocksStored(job, keys))

    def _on_mark(self, mark: Any) -> None:
        if isinstance(mark, BlocksStored):
            self._settle(mark.job, mark.keys)
        elif isinstance(mark, LayerStored):
            self._layer_stored(mark.job)
        else:
            super()._on_mark(mark)

    def _write_failed(self, put: BlockPut) -> None:
        with self.lock:
            job = self.jobs.get(put.request_id)
            if job is not None and job.put is put and put.error is not None:
                self.fail(job, put.error)

    # -- layer-wise prefill: a loader brings one layer of the prefix while another is computed

    def _traced_prefix(
        self, job: PrefillJob, layers: LayeredJob, found: FoundPrefix, allowed: Fetching
    ) -> LayeredPrefix:
        """Locate the prefix of a layer-wise prompt. Only the first attempt reads layers from remote
        nodes. Attempt TRACED_MAX + 1 uses no prefix, so it cannot miss a block."""
        layers.attempts += 1
        if layers.attempts > TRACED_MAX:
            found, allowed = FoundPrefix([], []), Fetching()
        prefix = self._prefixes.trace(
            job.put.keys, found, allowed, job.request_id, from_remote=layers.attempts == 1
        )
        layers.prefix, layers.load_left_s = prefix, self.config.transfer_s_max
        return prefix

    def _load_layers_soon(self) -> None:
        """Start loading each prompt's next layer, in queue order, with the lock held.

        A node sends one layer at a time, beginning with the layer that is needed first.
        """
        for request_id, layer in self.batching.layers_to_load():
            job = self.jobs[request_id]
            assert job.layers is not None and job.layers.prefix is not None, request_id
            nodes = job.layers.prefix.nodes
            may_load = job.state.phase is JobPhase.COMPUTING and not job.state.is_busy
            if may_load and not nodes & self._nodes_read:
                self._nodes_read |= nodes
                job.layers.due = layer
                self.post(job, On.LAYER_DUE)

    def _bring_layer(self, job: PrefillJob) -> None:
        """Load one layer of the prefix into the ring buffers. Runs in a loader's thread."""
        layers, started_s = job.layers, time.monotonic()
        assert layers is not None and layers.prefix is not None, job.request_id
        assert job.put.rings is not None, job.request_id
        prefix, layer = layers.prefix, layers.due
        event, value = On.LAYER_READ, cast(Any, False)
        try:
            if self._loader.load_layer(
                prefix.copies,
                [of_block[layer] for of_block in prefix.digests],
                job.put.rings,
                layer,
                layers.load_left_s,
            ):
                numbers = job.put.rings.numbers[: len(prefix.copies)]
                cast(LayerEngine, self.driver.engine).import_layer(numbers, layer)
                if remote := prefix.remote(self.config.store_node):
                    self.writer.layer_done(job.put, remote, layer)
                value = True
        except Exception as problem:  # Catch all: keep the loader's thread
            event, value = On.LOAD_FAILED, self._load_error(job, problem)
        took_s = time.monotonic() - started_s
        with self.lock:
            self._nodes_read -= prefix.nodes
            job.load_s += took_s
            layers.load_left_s -= took_s
            self.post(job, event, value)
            self._load_layers_soon()
            self.lock.notify_all()

    def _layer_stored(self, job: PrefillJob) -> None:
        """Report to the batching that a layer is stored. Runs in the writer's thread."""
        with self.lock:
            if not job.has_left:
                self.batching.layer_stored(job.request_id)
                self._load_layers_soon()
                self.lock.notify_all()

    def _stop_batch(self, job: PrefillJob) -> None:
        assert job.layers is not None, job.request_id
        log.info("a block of %s's prefix is missing: the prompt starts again", job.request_id)
        self.batching.stop(job.request_id)
        job.layers.computing = None

    # -- its KV is stored: the reply

    def _reply(self, job: PrefillJob) -> None:
        reply = job.reply(self.process.incarnation, self.driver.engine.layout.block_bytes)
        job.observe(reply, self.config.block_tokens, self.process.observations)
        if job.state.keeps_leases:
            self._lease_to_copies(job)
        assert job.state.token_id is not None, job.request_id
        job.client.prefilled(job.state.token_id, reply)

    def _lease_to_copies(self, job: PrefillJob) -> None:
        """Lease the blocks to each further answer, as they are leased to this one."""
        for request_id in job.request.copies[: len(job.copies)]:
            try:
                self.process.store.lookup(job.put.stored_keys, request_id, self.config.lease_s)
            except StoreError as error:  # the blocks may be gone before the answer decodes
                log.warning("the blocks of %s were not leased: %s", request_id, error)
                break  # the directory would not answer for the others either

    # -- it leaves

    def _fail(self, job: PrefillJob) -> None:
        if job.computed_tokens:
            name = "mooncake_aborted_prefill_tokens_total"
            self.process.observations.observe(name, job.computed_tokens)
        job.client.fail(job.state.error or Cancelled("the request was stopped"))

    # -- what the worker says of itself

    def report(self) -> WorkerReport:
        with self.lock:
            return self._report(
                queue_requests=len(self.jobs),
                queue_tokens=self.batching.queue_tokens,
                running=self.batching.admitted,
                context_tokens=0,
                step_s=self.process.steps.recent_s,
            )

    def check(self) -> None:
        with self.lock:
            super().check()
            self._single_flight.check()
