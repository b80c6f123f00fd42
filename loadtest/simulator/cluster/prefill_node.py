"""A prefill worker: the real queue and batching; a GPU model gives the time of a step.

The order is that of backends/workers/prefill_worker.py. A prompt waits for pages and looks up its
prefix. It is blocked while another prompt computes the next block. It fetches the blocks that the
conductor chose, loads them, is computed in chunks together with other prompts, and puts each block
that is complete. Fetching and loading overlap with the computing of other prompts, as there.

Not here: layers on several nodes (pipeline.py), the hand-over to decode (decode_node.py), retries
(fleet.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backends.engine.batching.batching import Chunk, PrefillBatching
from backends.workers.prefix_loading import SingleFlight
from backends.workers.step_times import StepTimes
from conductor.estimates.estimates import PrefillEstimate
from loadtest.simulator.cluster.gpu import prompt_s
from loadtest.simulator.cluster.job import STOPPED, SimulatedJob
from loadtest.simulator.cluster.site import SimulatedSite, SimulatedWorker
from loadtest.simulator.cluster.steps import Jitter
from loadtest.simulator.cluster.store import Found
from mooncake_store.records.membership import SSD_SUFFIX, WorkerReport


class PromptComputer(SimulatedWorker):
    """A worker that computes prefill steps: of all layers, or of a later stage's (pipeline.py)."""

    def __init__(self, worker_id: str, node_id: str, site: SimulatedSite, jitter: Jitter) -> None:
        super().__init__(worker_id, node_id, site, jitter)
        self.share = 1.0  # share of the layers, 0 < share <= 1
        self._steps = StepTimes()
        self._is_busy = False

    def _turn_busy(self, is_busy: bool) -> None:
        if self._is_busy != is_busy:
            self._is_busy = is_busy
            self._site.cores.compute("prefill", is_busy)

    def _step_s(self, chunks: Sequence[Chunk]) -> float:
        factor = self.slowness * self._site.cores.factor("prefill") * self.share
        factor *= float(self._jitter.factors(self._steps.steps, 1)[0])
        return factor * self._site.gpu.prefill_s([(c.start, c.tokens) for c in chunks])

    def _took(
        self, seconds: float, chunks: Sequence[Chunk], jobs: Sequence[SimulatedJob | None]
    ) -> None:
        """Record a step. `jobs`: the job of each chunk; None: it was cancelled."""
        self.busy_s += seconds
        self._steps.took(seconds)
        new_tokens = chunks[0].tokens if len(chunks) == 1 else sum(c.tokens for c in chunks)
        for chunk, job in zip(chunks, jobs, strict=True):
            if job is not None:
                job.own_compute_s += seconds * chunk.tokens / new_tokens


class PrefillNode(PromptComputer):
    """`on_begin`: a job's first chunk begins; `on_end`: first token computed, or failed."""

    def __init__(
        self,
        worker_id: str,
        node_id: str,
        site: SimulatedSite,
        jitter: Jitter,
        estimate: PrefillEstimate,
        on_begin: Callable[[SimulatedJob], None],
        on_end: Callable[[SimulatedJob], None],
    ) -> None:
        super().__init__(worker_id, node_id, site, jitter)
        self._on_begin, self._on_end = on_begin, on_end
        settings = site.settings
        self._batching = PrefillBatching(
            self._pool,
            settings.block_tokens,
            settings.chunk_tokens,
            slots_max=site.pages_max,
            waiting_max=settings.waiting_max,
            overhead_tokens=estimate.overhead_tokens,
        )
        self._single_flight = SingleFlight()
        self._jobs: dict[str, SimulatedJob] = {}
        # by the block key that another prompt computes
        self._blocked: dict[bytes, list[SimulatedJob]] = {}
        self._loaded_blocks: dict[str, int] = {}
        self._chunks: Sequence[Chunk] = ()  # chunks of the step under way

    def submit(self, job: SimulatedJob, key_s: float) -> None:
        self._jobs[job.request_id] = job
        if not self._batching.add(job.request_id, job.prompt_tokens, key_s):
            del self._jobs[job.request_id]
            job.refused = "prefill_queue_full"
            self._on_end(job)
            return
        self._wake()

    def paced_s(self, job: SimulatedJob) -> float:
        """Seconds from a job's first chunk to its first token, if it shares no step."""
        tokens, chunk_tokens = job.prompt_tokens, self._site.settings.chunk_tokens
        return prompt_s(self._site.gpu, job.cached_tokens, tokens, chunk_tokens)

    def report(self) -> WorkerReport:
        batching = self._batching
        return WorkerReport(
            self.worker_id,
            self.incarnation,
            len(self._jobs),
            batching.queue_tokens,
            batching.admitted,
            self._pool.used_pages,
            0,
            self._steps.recent_s,
            self.is_draining,
        )

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def stop(self, request_id: str) -> None:
        """Cancel a request: at once, with the step under way, or after its prefix transfer."""
        job = self._jobs.get(request_id)
        if job is None or job.refused:
            return
        job.refused = STOPPED
        blocked = [(key, jobs) for key, jobs in self._blocked.items() if job in jobs]
        is_computed = any(chunk.request_id == request_id for chunk in self._chunks)
        is_ready = request_id in self._loaded_blocks and not is_computed
        if blocked or is_ready or self._batching.is_waiting(request_id):
            for key, jobs in blocked:
                jobs.remove(job)
                if not jobs:
                    del self._blocked[key]
            self._leave(job)
            self._wake()

    def die(self) -> list[SimulatedJob]:
        """Kill the process; returns its jobs, which will not end by themselves."""
        self.is_dead = True
        jobs, self._jobs = list(self._jobs.values()), {}
        return jobs

    def _wake(self) -> None:
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        """The engine is free: admit prompts, and compute the next step."""
        for admitted in self._batching.admit():
            self._load(self._jobs[admitted.request_id])
        chunks = self._batching.next_step()
        self._turn_busy(bool(chunks))
        self._chunks = chunks
        if not chunks:
            return
        now_s = self._site.clock.now_s
        for chunk in chunks:
            job = self._jobs[chunk.request_id]
            if job.started_s is None:
                job.started_s = now_s
                self._on_begin(job)
        seconds = self._step_s(chunks)
        if len(self._jobs) > 1:
            beside = self._site.cores.computing("prefill")
            price_s = self._site.settings.queued_prompt_s * beside
            seconds += price_s * sum(chunk.is_last for chunk in chunks)
        self._site.clock.after(seconds, self._stepped, chunks, seconds)

    # -- loading the prefix

    def _load(self, job: SimulatedJob) -> None:
        """Look the prefix up, and fetch the chosen blocks."""
        site, route = self._site, job.route
        assert route is not None
        if job.load_began_s is None:
            job.load_began_s = site.clock.now_s
        found = site.store.find(job.keys, self.node_id, job.request_id)
        if not self._single_flight.lead(job.keys[found.own :], job.request_id):
            self._blocked.setdefault(job.keys[found.own], []).append(job)
            return
        wanted = self._wanted(found, route.fetch_blocks, route.fetch_nodes)
        if wanted:  # its first entry is remote or on the SSD, else `found.own` would count it
            self._bring(job, found.own, wanted)
        else:
            self._read(job, found.own)

    def _wanted(self, found: Found, fetch_blocks: int, sources: Sequence[str]) -> list[str]:
        """The holder that each block after the own ones comes from. The node's own SSD comes first.
        Then other nodes follow for at most `fetch_blocks` blocks, each from the first of `sources`
        that has it. "" is a block that is in this node's DRAM after a gap."""
        here, ssd = self.node_id, self.node_id + SSD_SUFFIX
        wanted: list[str] = []
        allowed = fetch_blocks
        for places in found.copies[found.own :]:
            holders = [copy.node_id for copy in places]
            if here in holders or ssd in holders:
                wanted.append("" if here in holders else ssd)
                continue
            if allowed <= 0:
                break
            allowed -= 1
            named = (holder for node in sources for holder in (node, node + SSD_SUFFIX))
            wanted.append(next((holder for holder in named if holder in holders), holders[0]))
        return wanted

    def _bring(self, job: SimulatedJob, own: int, wanted: Sequence[str]) -> None:
        """Fetch the wanted blocks from each holder, those of an SSD through its node's DRAM."""
        by_holder: dict[str, list[bytes]] = {}
        for key, holder in zip(job.keys[own:], wanted, strict=False):
            if holder:
                by_holder.setdefault(holder, []).append(key)
        left, lost = len(by_holder), set[bytes]()

        def arrived() -> None:
            nonlocal left
            left -= 1
            if left or self.is_dead:
                return
            blocks = own + len(wanted)
            if lost:
                blocks = next(at for at, key in enumerate(job.keys) if key in lost)
            there = self._site.store.put(job.keys[:blocks], self.node_id, job.request_id)
            restored = wanted[: max(0, there - own)].count(self.node_id + SSD_SUFFIX)
            job.restored_blocks = restored
            job.fetched_blocks = max(0, there - own - restored)
            self._read(job, there)

        for holder, keys in by_holder.items():
            self._bring_from(job, holder, keys, lost, arrived)

    def _bring_from(
        self,
        job: SimulatedJob,
        holder: str,
        keys: Sequence[bytes],
        lost: set[bytes],
        arrived: Callable[[], None],
    ) -> None:
        """`lost` collects the keys that found no room on the way."""
        node_id, site = holder.removesuffix(SSD_SUFFIX), self._site

        def send(blocks: int) -> None:
            lost.update(keys[blocks:])
            if node_id == self.node_id or not blocks:
                arrived()
            else:
                site.network.send(node_id, self.node_id, blocks * site.block_bytes, arrived)

        if holder == node_id:
            send(len(keys))
        else:
            site.ssds.restore(node_id, keys, job.request_id, send)

    def _read(self, job: SimulatedJob, blocks: int) -> None:
        rate = self._site.settings.host_to_gpu_bytes_per_s
        seconds = blocks * self._site.block_bytes / rate
        self._site.clock.after(seconds, self._read_in, job, blocks)

    def _read_in(self, job: SimulatedJob, blocks: int) -> None:
        if self.is_dead:
            return
        if job.refused:
            self._leave(job)
            self._wake()
            return
        if job.load_began_s is not None:
            job.loading_s = self._site.clock.now_s - job.load_began_s
        tokens = blocks * self._site.settings.block_tokens
        job.cached_tokens = min(tokens, job.prompt_tokens - 1)
        self._loaded_blocks[job.request_id] = blocks
        self._batching.start(job.request_id, job.cached_tokens)
        self._settle(job, job.keys[:blocks])
        self._wake()

    def _settle(self, job: SimulatedJob, keys: Sequence[bytes] | None) -> None:
        """These blocks (None: all it leads) are stored or abandoned: retry blocked prompts."""
        self._single_flight.settle(keys, job.request_id)
        if not self._blocked:
            return
        settled = job.keys if keys is None else keys
        for other in [other for key in settled for other in self._blocked.pop(key, ())]:
            self._load(other)

    # -- computing and leaving

    def _stepped(self, chunks: Sequence[Chunk], seconds: float) -> None:
        if self.is_dead:
            return
        self._took(seconds, chunks, [self._jobs.get(chunk.request_id) for chunk in chunks])
        self._batching.computed(chunks)
        self._computed(chunks, seconds)
        self._begin()

    def _computed(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Called when this worker has computed the chunks; without stages it has all layers."""
        for chunk in chunks:
            self._jobs[chunk.request_id].compute_s += seconds
        self._end_chunks(chunks)

    def _end_chunks(self, chunks: Sequence[Chunk]) -> None:
        """All layers of these chunks are computed and on this node."""
        for chunk in chunks:
            job = self._jobs.get(chunk.request_id)
            if job is None:
                continue  # cancelled while other stages still computed
            self._put(job, chunk)
            if job.refused or chunk.is_last:
                self._leave(job)

    def _put(self, job: SimulatedJob, chunk: Chunk) -> None:
        """Put the blocks that this chunk completed, and the partial last block of the prompt."""
        store, block_tokens = self._site.store, self._site.settings.block_tokens
        end = chunk.start + chunk.tokens
        first = max(self._loaded_blocks[job.request_id], chunk.start // block_tokens)
        keys = job.keys[first : min(end // block_tokens, len(job.keys))]
        is_stored = not keys or store.put(keys, self.node_id, job.request_id) == len(keys)
        if is_stored and chunk.is_last and end % block_tokens:
            is_stored = store.put_tail(self.node_id, job.request_id)
        if not is_stored:
            job.refused = "store_full"
        if keys:
            self._settle(job, keys)

    def _leave(self, job: SimulatedJob) -> None:
        del self._jobs[job.request_id]
        self._loaded_blocks.pop(job.request_id, None)
        self._pool.release(self._batching.remove(job.request_id))
        self._settle(job, None)
        if not job.refused:
            job.prefilled_s = self._site.clock.now_s
        self._on_end(job)

    def check(self) -> None:
        """Check the invariants; an idle worker holds no pages, prefixes or tokens."""
        self._batching.check()
        self._pool.check()
        self._single_flight.check()
        if not self._jobs and not self.is_dead:
            left = (self._pool.used_pages, len(self._single_flight), self._batching.queue_tokens)
            assert left == (0, 0, 0), f"{self.worker_id} kept pages, prefixes, tokens: {left}"
