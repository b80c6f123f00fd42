"""The prefill worker: computes prompts, writes their KV to the store, and samples one token each.

A prompt waits for pages. A loader then loads its cached prefix (prefix_loading.py), and the driver
computes the other tokens, together with other prompts. During the computation, the writer
(kv_writer.py) copies the KV to the store. The worker replies after the last block is committed.
Threads: the engine's thread runs the engine loop (worker.py), loaders read KV, a writer stores KV.

Layer-wise prefill: with `layerwise` on, a prompt longer than a step is computed layer by layer.
Exception: a short, mostly cached prompt is computed in chunks (engine/batching/batching.py). While
a layer is computed, a loader reads the cached prefix's next layer into layer ring buffers, which
have room for three layers of each block (engine/batching/layer_passes.py). The layer may come from
a remote node, and is then also written to the local node. If a block is missing, the prompt starts
again, and its prefix is first fetched to the local node.

A prompt whose logprobs are wanted is computed from its first token. Cached blocks are not loaded,
but the decode worker gets them, and only the other blocks are stored.

Not here: Triton's API (prefill/model.py), steps and engines (step_driver.py, trtllm/prefill.py).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import cast

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
from backends.workers.prefix_loading import (
    Fetching,
    FoundPrefix,
    LayeredPrefix,
    LoadedPrefix,
    PrefixLoading,
    SingleFlight,
)
from backends.workers.protocol import BlockRef, PrefillReply, PrefillRequest
from backends.workers.worker import JobWorker
from conductor.estimates.estimates import PrefillEstimate
from mooncake_store.block_keys import block_keys, chain_seed, tenant_of
from mooncake_store.errors import StoreError
from mooncake_store.layout import blocks_touched
from mooncake_store.records.membership import WorkerReport

# After this many layer-wise attempts with its cached prefix, a prompt is computed without it.
TRACED_MAX = 3
log = logging.getLogger(__name__)


class PrefillWorker(JobWorker[PrefillJob]):
    role = "prefill"
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
        self._broken: list[PrefillJob] = []  # layer-wise prompts that must start again
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
            functools.partial(driver.load_prefix, self._loader),
            config.store_node,
            config.lease_s,
            config.transfer_s_max,
        )
        driver.begin(self)
        self._serve()

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
            self.jobs[request.request_id] = job
            self._admit_waiting()  # now, so that the prefix is loaded during the current step
            self.lock.notify_all()

    def _scores(self, request: PrefillRequest, ids: np.ndarray) -> PromptScores | None:
        if not request.sampling.scores_prompt:
            return None
        top = min(request.sampling.prompt_logprobs, self.driver.engine.vocabulary_tokens)
        return PromptScores(ids[: request.prompt_tokens].astype(np.int32), top)

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

    # -- loading the prefix

    def _admit(self) -> None:
        broken, self._broken = self._broken, []
        for job in broken:
            if not self.has_left(job) and not job.is_leaving:
                self._begin_again(job)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Admit requests and start their loads, also during a step. The caller holds the lock."""
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
            self._load_soon(job)

    def _load_soon(self, job: PrefillJob) -> None:
        job.is_loading = True
        self._loading.submit(self._load, job, self._bring_prefix)

    def _bring_prefix(self, job: PrefillJob) -> bool:
        """Load the cached prefix, or locate it for layer-wise prefill. False if the job is blocked
        by another prompt. Runs in a loader's thread."""
        job.loading_from_s = started_s = time.monotonic()
        self.process.owners.hold(job.request_id, started_s, job.put.keys)
        if not job.is_leaving and not self._load_prefix(job):
            return False
        job.load_s = time.monotonic() - started_s
        return True

    def _load_prefix(self, job: PrefillJob) -> bool:
        """As `_bring_prefix`. A blocked job waits for a block that another prompt produces."""
        put = job.put
        found = self._prefixes.find(put.keys, job.request_id)
        with self.lock:
            missing = put.keys[len(found.local) :]
            leads = self._single_flight.lead(missing, job.request_id)
            if not leads and not self._overtakes(job, missing[0]):
                job.is_loading = False
                self._blocked.append(job)
                return False
        allowed = Fetching(job.request.fetch_blocks, tuple(job.request.fetch_nodes))
        prefix: LoadedPrefix
        if job.scores is not None:
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
        self.writer.then(lambda: self.writer.announce_cached(put))
        self._settle(job, [put.keys[block] for block in put.refs])
        return True

    def _overtakes(self, job: PrefillJob, key: bytes) -> bool:
        """True if a layer-wise prompt produces the block, and is after this job in queue order.

        A layer-wise prompt completes its blocks only with its last layer. Computing the block a
        second time is faster than waiting for the last layer. The caller holds the lock.
        """
        leader = self.jobs.get(self._single_flight.owner_of(key) or "")
        if leader is None or leader.layers is None:
            return False
        return self.batching.goes_before(job.request_id, leader.request_id)

    # -- layer-wise prefill

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
            is_over = job.is_leaving or job.layers.is_broken
            if not is_over and not job.is_loading and not nodes & self._nodes_read:
                job.is_loading = True
                self._nodes_read |= nodes
                self._loading.submit(self._load_layer, job, job.layers, layer)

    def _load_layer(self, job: PrefillJob, layers: LayeredJob, layer: int) -> None:
        """Load one layer of the prefix into the ring buffers, and report it to the batching. If a
        block is missing, the prompt starts again. Runs in a loader's thread."""
        started_s, prefix, has_arrived = time.monotonic(), layers.prefix, False
        assert prefix is not None and job.put.rings is not None, job.request_id
        error: Exception | None = None
        try:
            has_arrived = self._loader.load_layer(
                prefix.copies,
                [of_block[layer] for of_block in prefix.digests],
                job.put.rings,
                layer,
                layers.load_left_s,
            )
            if has_arrived:
                numbers = job.put.rings.numbers[: len(prefix.copies)]
                cast(LayerEngine, self.driver.engine).import_layer(numbers, layer)
                if remote := prefix.remote(self.config.store_node):
                    self.writer.layer_done(job.put, remote, layer)
        except Exception as problem:  # Catch all: keep the loader's thread
            error = self._load_error(job, problem)
        took_s = time.monotonic() - started_s
        with self.lock:
            self._nodes_read -= prefix.nodes
            job.is_loading = False
            job.load_s += took_s
            layers.load_left_s -= took_s
            if error is not None:
                self.fail(job, error)
            elif has_arrived:
                self.batching.layer_loaded(job.request_id)
            else:
                layers.is_broken = True
                self._broken.append(job)
            self._load_layers_soon()
            self.lock.notify_all()

    def layer_stored(self, job: PrefillJob) -> None:
        """Report to the batching that a layer is stored. Runs in the writer's thread."""
        with self.lock:
            if not self.has_left(job):
                self.batching.layer_stored(job.request_id)
                self._load_layers_soon()
                self.lock.notify_all()

    def _begin_again(self, job: PrefillJob) -> None:
        """Discard the job's computed tokens and slots, then load its prefix again. Called between
        two steps, with the lock held."""
        assert job.layers is not None, job.request_id
        log.info("a block of %s's prefix is missing: the prompt starts again", job.request_id)
        self.batching.stop(job.request_id)
        job.layers.computing, job.layers.is_broken = None, False
        job.is_loading = True
        self.writer.begin_again(job.put)
        self.writer.then(lambda: self._load_soon(job))

    def _settle(self, job: PrefillJob, keys: Sequence[bytes] | None) -> None:
        """Record that the job no longer produces these blocks (None: all its blocks), because they
        are stored or abandoned. Then retry the blocked prompts."""
        with self.lock:
            self._single_flight.settle(keys, job.request_id)
            blocked, self._blocked = self._blocked, []
            for other in blocked:
                if not self.has_left(other) and not other.is_leaving:
                    self._load_soon(other)

    # -- called by a driver

    def join_batch(self, job: PrefillJob) -> bool:
        """Start a loaded job in the batching. False if the job is leaving or has left. The caller
        holds the lock."""
        if not self._may_join(job):
            return False
        prefix = job.layers.prefix if job.layers is not None else None
        is_loaded = prefix is None or not prefix.copies
        self.batching.start(job.request_id, job.cached_tokens, is_loaded)
        self._load_layers_soon()
        return True

    def settle_behind(self, job: PrefillJob, blocks: range | None) -> None:
        """Call `_settle` for these blocks (None: all) after the writer's queued tasks."""
        keys = None if blocks is None else job.put.keys[blocks.start : blocks.stop]
        self.writer.then(lambda: self._settle(job, keys))

    def send_first_token(self, job: PrefillJob, token_id: int) -> None:
        """Send the first token to the frontend before the reply, if `first_token` allows it."""
        if message := job.first_token(token_id):
            self.process.outbox.send(job.request.reply_inbox, message)

    def answer(self, job: PrefillJob, token_id: int) -> None:
        """Reply for a computed prompt, and remove it, after the writer's queued tasks."""
        self.writer.then(lambda: self._answer(job, token_id))

    def answer_early(self, job: PrefillJob, token_id: int) -> None:
        """Reply after the writer's queued tasks, but keep the job until `over`.

        Used with engines that hand KV over by themselves. The store gets the KV after the reply.
        """
        self.writer.then(lambda: job.client.prefilled(token_id, self._reply(job)))

    def over(self, job: PrefillJob) -> None:
        """Remove a job that `answer_early` replied to, after the writer's queued tasks."""
        self.writer.then(lambda: self._forget(job, keep_leases=False))

    # -- leaving

    def _drop_leaving(self) -> None:
        for job in [j for j in self.jobs.values() if j.is_leaving and not j.is_loading]:
            del self.jobs[job.request_id]
            pages = self.batching.remove(job.request_id)
            self.driver.abort(job)
            left = functools.partial(self._left, job, pages)
            # `_left` must run after the writer's last task for the job.
            self.driver.behind(job, functools.partial(self.writer.then, left))

    def _left(self, job: PrefillJob, pages: list[int]) -> None:
        """Release pages, slots and leases, and fail the client. Runs in the writer's thread."""
        release = functools.partial(self.process.owners.release, job.request_id)
        self.driver.free(job, pages, release)
        self._settle(job, None)
        if job.computed_tokens:
            name = "mooncake_aborted_prefill_tokens_total"
            self.process.observations.observe(name, job.computed_tokens)
        job.client.fail(job.error or job.put.error or Cancelled("the request was stopped"))

    def _answer(self, job: PrefillJob, token_id: int) -> None:
        """Reply, or fail if a write has failed. Runs in the writer's thread, after all writes."""
        if job.put.error is not None:
            self.fail(job, job.put.error)
            return
        reply = self._reply(job)
        if job.request.decode_inbox:
            self._lease_to_copies(job)
        if self._forget(job, keep_leases=bool(job.request.decode_inbox)):
            job.client.prefilled(token_id, reply)

    def _lease_to_copies(self, job: PrefillJob) -> None:
        """Lease the blocks to each further answer, as they are leased to this one."""
        for request_id in job.request.copies[: len(job.copies)]:
            try:
                self.process.store.lookup(job.put.stored_keys, request_id, self.config.lease_s)
            except StoreError as error:  # the blocks may be gone before the answer decodes
                log.warning("the blocks of %s were not leased: %s", request_id, error)
                break  # the directory would not answer for the others either

    def _reply(self, job: PrefillJob) -> PrefillReply:
        reply = job.reply(self.process.incarnation, self.driver.engine.layout.block_bytes)
        job.observe(reply, self.config.block_tokens, self.process.observations)
        return reply

    def _forget(self, job: PrefillJob, keep_leases: bool) -> bool:
        """Remove a successful job and release its pages. False if the job has left or failed.
        `keep_leases`: the leases stay for the decode worker. Runs in the writer's thread."""
        with self.lock:
            if self.has_left(job) or job.error is not None:
                return False
            del self.jobs[job.request_id]
            pages = self.batching.remove(job.request_id)
            self.driver.abort(job)
            self.lock.notify_all()
        self.driver.free(job, pages)
        self._settle(job, None)
        if keep_leases:
            self.process.owners.drop(job.request_id)
        else:
            self.process.owners.release(job.request_id)
        return True
