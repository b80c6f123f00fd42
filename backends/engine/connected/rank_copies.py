"""The copies of one rank: loads before a forward pass, saves after it.

The engine's thread passes orders on and does not wait for copies (HostCopier loads at once). The
thread of copies waits for events, copies, notifies the worker, and counts the finished moves of
each request. The counts decide when a request is drained, and when the engine may reuse its pages.

A load checks after the copy that the slot still holds the verified block, which a lease ensures. If
it does not, the engine's pages hold unknown bytes: the rank sends `Broken`. A save checks before
the copy. If the slot is not the worker's any more, no further page of the request is saved. Such a
slot is quarantined for longer than check and copy take.

Not here: which pages are copied (scheduler.py), the copies themselves (copier.py).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import BlockPages, LlmId, Move, Orders
from backends.engine.connected.copier import Copier, Event, RegionRefused, make_copier
from backends.engine.connected.host_memory import map_pool
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.segment_file import SegmentRefused

log = logging.getLogger(__name__)
FENCE_S_MAX = 60.0  # longer than any copy; then an error instead of an engine that hangs
PART_BYTES_MAX = 64 * 2**20  # copied before other moves get a turn, or before the next Saved


class Batch(NamedTuple):
    moves: list[Move]
    is_load: bool
    # Loads: reached after the copy. Saves and loads aside: reached when the copy may start.
    event: Event | None
    is_aside: bool = False  # then there is one move
    pages_done: int = 0  # of the load aside


class RankCopies:
    def __init__(
        self,
        pages: BlockPages,
        copier: Copier,
        send: Callable[[m.ToWorker], None],
        recomputes: bool = False,
    ) -> None:
        """`recomputes`: the engine computes what could not be loaded (`has_failed`), and asks which
        saves have ended (`ended_saves`) instead of keeping pages back."""
        self._recomputes = recomputes
        self._pages = pages
        self._part_pages = max(1, PART_BYTES_MAX // pages.page_bytes)
        self._copier = copier
        self._send = send
        self._lock = threading.Condition()
        self._ended: Counter[str] = Counter()  # finished moves, by request
        self._draining: dict[str, int] = {}  # moves that must end before Drained, by request
        self._saving: Counter[LlmId] = Counter()  # saves that have not ended
        self._loading: Counter[LlmId] = Counter()  # loads aside that have not ended
        self._started: list[LlmId] = []  # the engine waits for their loads
        self._finished: deque[LlmId] = deque()  # the engine waits for their saves; oldest first
        self._next_saves: list[Move] = []  # of the present pass
        self._holed: set[str] = set()  # requests with pages that were not computed or not saved
        self._given_away: set[str] = set()  # requests whose slots are not the worker's any more
        self._failed: set[LlmId] = set()  # loads aside that failed, until the engine asks
        self._ended_saves: Counter[LlmId] = Counter()  # since the engine has asked
        self._load_event: Event | None = None
        self._load_stream: Any = None
        self._is_broken = False
        self._segments: dict[int, Segment] = {}  # by region
        self._attaching: dict[int, bool] = {}  # region -> whether it was unmapped meanwhile
        self._batches: queue.SimpleQueue[Batch | m.UnmapSegment | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    # -- the engine's thread

    def start(self, orders: Orders, stream: Any) -> None:
        """Called before the forward pass."""
        self._load_event = None
        self._drop_uncomputed()
        for llm_id in orders.fences:
            self._wait_saved(llm_id)
        if orders.saves:
            self._next_saves += orders.saves
            with self._lock:
                self._saving.update(move.llm_id for move in orders.saves)
        aside = [move for move in orders.loads if move.is_aside]
        if loads := [move for move in orders.loads if not move.is_aside]:
            if runs := self._pages.runs(loads):
                self._load_event = self._copier.load(runs, stream)
            self._load_stream = stream
            self._batches.put(Batch(loads, True, self._load_event))
        if aside:
            with self._lock:
                self._loading.update(move.llm_id for move in aside)
            # Their pages may just have been freed by a request whose last step still runs.
            event = self._copier.record(stream)
            for move in aside:
                self._batches.put(Batch([move], True, event, is_aside=True))

    def _drop_uncomputed(self) -> None:
        """Drop the saves of a pass that raised: `after_forward` was not called for it."""
        saves, self._next_saves = self._next_saves, []
        if saves:
            with self._lock:
                self._holed.update(move.request_id for move in saves)
            log.warning("a forward pass failed: KV of %d requests is not saved", len(saves))
            self._end(saves, is_load=False)

    def _wait_saved(self, llm_id: LlmId) -> None:
        with self._lock:
            if not self._lock.wait_for(lambda: not self._saving[llm_id], FENCE_S_MAX):
                raise RuntimeError(f"KV was not copied within {FENCE_S_MAX:g} s")

    def before_layer(self, stream: Any) -> None:
        """A forward pass on another stream than that of `start` waits for the loads too."""
        if self._load_event is not None and stream != self._load_stream:
            stream.wait_event(self._load_event)
            self._load_stream = stream

    def after_forward(self, stream: Any) -> None:
        saves, self._next_saves = self._next_saves, []
        if saves:
            with self._lock:  # Saved includes all leading tokens, so it stops at a hole
                after_hole = [move for move in saves if move.request_id in self._holed]
            if after_hole:
                self._end(after_hole, is_load=False)
                saves = [move for move in saves if move not in after_hole]
            self._batches.put(Batch(saves, False, self._copier.record(stream)))

    def finished(self, llm_ids: Sequence[LlmId]) -> list[LlmId]:
        """The requests whose pages the engine may reuse: at most one, always the oldest.

        Older releases of TensorRT-LLM end one save in a step and forget the others. With one
        request at a time, in one order on all ranks, no step completes two requests.

        Called at the end of each step, also of one whose pass raised.
        """
        self._drop_uncomputed()
        with self._lock:
            self._finished.extend(sorted(llm_ids))
            if not self._finished:
                return []
            oldest = self._finished[0]
            if self._saving[oldest] or self._loading[oldest]:
                return []
            return [self._finished.popleft()]

    def loaded(self, llm_ids: Sequence[LlmId]) -> list[LlmId]:
        """The requests, of these and of earlier calls, that are loaded and may be computed."""
        with self._lock:
            self._started.extend(llm_ids)
            over = [llm_id for llm_id in self._started if not self._loading[llm_id]]
            self._started = [llm_id for llm_id in self._started if self._loading[llm_id]]
            return over

    def has_failed(self, llm_id: LlmId) -> bool:
        """True if this load failed. Asked once, after `loaded`."""
        with self._lock:
            is_failed = llm_id in self._failed
            self._failed.discard(llm_id)
            return is_failed

    def ended_saves(self) -> dict[LlmId, int]:
        """Number of saves that have ended since the last call, by request."""
        with self._lock:
            ended, self._ended_saves = self._ended_saves, Counter()
            return dict(ended)

    # -- the channel's thread

    def on_message(self, message: m.ToConnector) -> None:
        if isinstance(message, m.Drain):
            with self._lock:
                self._draining[message.request_id] = message.moves
                is_over = self._take_drained(message.request_id)
            if is_over:
                self._send(m.Drained(message.request_id, self._pages.rank))
        elif isinstance(message, m.MapSegment):  # slow, as it locks all pages
            self._attaching[message.region] = False
            threading.Thread(
                target=self._attach, args=[message], name="kv-attach", daemon=True
            ).start()
        elif isinstance(message, m.UnmapSegment):
            self._batches.put(message)  # after the copies that are queued

    def _attach(self, message: m.MapSegment) -> None:
        problem = ""
        try:
            segment = Segment.open(message.path, message.size_bytes)
            try:
                self._copier.add(message.region, segment.view)
                self._segments[message.region] = segment
            except BaseException:
                segment.close()
                raise
        except (SegmentRefused, RegionRefused, OSError) as error:
            problem = f"rank {self._pages.rank}: {error}"
        except Exception as error:  # Catch all: the worker waits for an answer
            log.exception("a segment could not be mapped")
            problem = f"rank {self._pages.rank}: {error!r}"
        with self._lock:
            is_unwanted = self._attaching.pop(message.region)
        if is_unwanted:
            self._batches.put(m.UnmapSegment(message.region))
        self._send(m.SegmentMapped(self._pages.rank, message.region, problem))

    def _detach(self, region: int) -> None:
        with self._lock:
            if region in self._attaching:
                self._attaching[region] = True
                return
            segment = self._segments.pop(region, None)
        if segment is not None:
            self._copier.remove(region)
            segment.close()

    def close(self) -> None:
        """Wait for the queued copies, but not long: their events may never be reached."""
        self._batches.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # -- the thread of copies

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            if isinstance(batch, m.UnmapSegment):
                self._detach(batch.region)
                continue
            if not self._is_broken:
                try:
                    if batch.is_aside:
                        self._load_aside(batch)
                        continue
                    self._load(batch) if batch.is_load else self._save(batch)
                except Exception as error:  # Catch all: the worker is notified, not the engine
                    log.exception("copying KV failed")
                    self._is_broken = True  # no further Saved
                    self._send(m.Broken(f"rank {self._pages.rank} could not copy KV: {error}"))
            if not batch.is_aside:
                self._end(batch.moves, batch.is_load)
            elif self._recomputes:  # otherwise a failed load must never count as ended
                self._fail_aside(batch.moves[0])
        self._copier.close()
        for segment in self._segments.values():
            segment.close()

    def _load_aside(self, batch: Batch) -> None:
        """Copy a part; the rest goes to the end of the queue."""
        (move,) = batch.moves
        stop = batch.pages_done + self._part_pages
        part = move.part(batch.pages_done, stop)
        try:
            self._copier.load_aside(self._pages.runs([part]), batch.event)
            if stop < len(move.block_ids):
                self._batches.put(batch._replace(pages_done=stop))
                return
            self._believe(batch.moves)
        except Exception as error:  # Catch all: the engine computes what is missing
            if not self._recomputes:
                raise
            log.warning("KV of %s could not be loaded: %s", move.request_id, error)
            self._fail_aside(move)
            return
        self._end(batch.moves, is_load=True)

    def _fail_aside(self, move: Move) -> None:
        """The engine computes these pages. The worker is notified that its places are not read."""
        with self._lock:
            self._failed.add(move.llm_id)
        self._send(m.Loaded(move.request_id, self._pages.rank))
        self._end([move], is_load=True)

    def _load(self, batch: Batch) -> None:
        if batch.event is not None:
            batch.event.synchronize()
        self._believe(batch.moves)

    def _believe(self, moves: Sequence[Move]) -> None:
        """Check the slots after these loads, then report the loads."""
        for move in moves:
            if not all(self._copier.memory.is_still(use) for use in move.uses):
                lost = "a slot of the storage node was given away while it was read for"
                raise RuntimeError(f"{lost} {move.request_id}")
            self._send(m.Loaded(move.request_id, self._pages.rank))

    def _save(self, batch: Batch) -> None:
        for move in batch.moves:
            for start in range(0, len(move.block_ids), self._part_pages):
                part = move.part(start, start + self._part_pages)
                if not self._may_save(part):
                    break
                if self._pages.is_saved:  # otherwise rank 0 copies it
                    self._copier.save(self._pages.runs([part]), batch.event)
                tokens = (part.first_page + len(part.block_ids)) * self._pages.tokens_per_block
                self._send(m.Saved(move.request_id, self._pages.rank, tokens))

    def _may_save(self, move: Move) -> bool:
        with self._lock:
            if move.request_id not in self._given_away:
                if all(self._copier.memory.is_still(use) for use in self._pages.uses(move)):
                    return True
                log.warning("slots for %s were given away: it is not saved", move.request_id)
                self._given_away.add(move.request_id)
                self._holed.add(move.request_id)
            return False

    def _end(self, moves: Sequence[Move], is_load: bool) -> None:
        """These moves have ended, with or without success."""
        with self._lock:
            for move in moves:
                self._ended[move.request_id] += 1
                if self._recomputes and not is_load:
                    self._ended_saves[move.llm_id] += 1
                if move.is_aside or not is_load:
                    pending = self._loading if is_load else self._saving
                    pending[move.llm_id] -= 1
                    if not pending[move.llm_id]:
                        del pending[move.llm_id]
            self._lock.notify_all()
            asked = {move.request_id for move in moves}
            drained = [request_id for request_id in asked if self._take_drained(request_id)]
        for request_id in drained:
            self._send(m.Drained(request_id, self._pages.rank))

    def _take_drained(self, request_id: str) -> bool:
        if self._draining.get(request_id, -1) != self._ended[request_id]:
            return False
        del self._draining[request_id], self._ended[request_id]
        self._holed.discard(request_id)
        self._given_away.discard(request_id)
        return True


def register(
    site: m.Site,
    pages: BlockPages,
    kv: Any,
    gpu_pages: int,
    send: Callable[[m.ToWorker], None],
    recomputes: bool = False,
) -> tuple[RankCopies, m.Ready]:
    """The copies of a rank, and the message to send then. Raises ValueError if the pages do not
    make up the site's blocks.

    `kv`: the memory of all pages of this rank, a contiguous torch tensor.
    """
    pages.check(site.block_bytes)
    pool = map_pool(site.pool_path, site.block_bytes)
    copies = RankCopies(pages, make_copier(kv, pool), send, recomputes)
    sizes = (pages.rank, pages.tp_size, pages.rank_bytes, pages.tokens_per_block)
    return copies, m.Ready(*sizes, len(pool) // site.block_bytes, gpu_pages)
