"""One rank's copies: loads before a forward pass, saves behind it, and who waits for them.

The executor's thread hands orders over and never waits for a copy to end (on a GPU; on the CPU
loads are copied at once). A thread of its own waits for events, copies what is to be saved, counts
what is over, tells the worker, and lets TensorRT-LLM have its pages back through `get_finished`.
Loads aside are copied there too, in parts, so that saves get their turn between.

A load out of a slot of the storage node is believed when the slot still holds, behind the copy,
what the worker has verified there: it is leased, so it does. If it does not, the worker has lost
its lease and not heard of it, and the engine's pages hold nobody knows what: `Broken`, and the
worker ends the engine. Nothing is called loaded before that look.

A save into such a slot looks first: what is not its worker's to fill any more is left alone, and
nothing from there on is called saved. (Between that look and the copy lies what lies between a
worker's look and its copy; a slot that was given up rests for longer before others have it.)

Of ranks that are alike only the first copies what is saved; the others say at once that it is, and
the worker believes it when all have said so.

A forward pass that raises is not followed by `wait_for_save`, and TensorRT-LLM goes on. What was
to be saved behind it was never computed: it counts as over, and nothing of it is called saved.

Not here: which copies (scheduler.py), how bytes move (copier.py).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from backends.engine.trtllm import messages as m
from backends.engine.trtllm.block_pages import BlockPages, Move, Orders, SlotUse
from backends.engine.trtllm.copier import Copier, Event, RegionRefused
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.segment_file import SegmentRefused

log = logging.getLogger(__name__)
FENCE_S_MAX = 60.0  # nothing takes so long; better an error than an executor that hangs
PART_BYTES_MAX = 64 * 2**20  # between two turns of others, or two words to the worker


class Batch(NamedTuple):
    moves: list[Move]
    is_load: bool
    event: (
        Event | None
    )  # loads: reached when they are over; saves, loads aside: when they may start
    is_aside: bool = False  # one move
    pages_done: int = 0  # of it


class RankCopies:
    def __init__(
        self,
        pages: BlockPages,
        tokens_per_block: int,
        copier: Copier,
        send: Callable[[m.ToWorker], None],
    ) -> None:
        self._pages = pages
        self._tokens_per_block = tokens_per_block
        self._copier = copier
        self._send = send
        self._lock = threading.Condition()
        self._ended: Counter[str] = Counter()  # moves that are over, by request
        self._draining: dict[str, int] = {}  # moves to be waited for
        self._saving: Counter[int] = Counter()  # moves that are not, by TensorRT-LLM's id
        self._loading: Counter[int] = Counter()  # loads aside that are not over, likewise
        self._started: list[int] = []  # TensorRT-LLM waits for their loads
        self._finished: deque[int] = deque()  # TensorRT-LLM waits for their saves; oldest first
        self._next_saves: list[Move] = []
        self._holed: set[str] = set()  # requests of which some pages were never computed
        self._given_away: set[str] = set()  # requests whose slots are others' by now
        self._load_event: Event | None = None
        self._load_stream: Any = None
        self._is_broken = False
        self._segments: dict[int, Segment] = {}  # by region
        self._attaching: set[int] = set()  # regions
        self._unwanted: set[int] = set()  # of those: let go of before they were there
        self._batches: queue.SimpleQueue[Batch | m.UnmapSegment | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    # -- the executor's thread

    def start(self, orders: Orders, stream: Any) -> None:
        """Before the forward pass."""
        self._load_event = None
        self._drop_uncomputed()
        for llm_id in orders.fences:
            self._wait_saved(llm_id)
        if orders.saves:
            self._next_saves += orders.saves
            with self._lock:
                for move in orders.saves:
                    self._saving[move.llm_id] += 1
        aside = [move for move in orders.loads if move.is_aside]
        if loads := [move for move in orders.loads if not move.is_aside]:
            self._load_event = self._copier.load(self._pages.runs(loads), stream)
            self._load_stream = stream
            self._batches.put(Batch(loads, True, self._load_event))
        if aside:
            with self._lock:
                self._loading.update(move.llm_id for move in aside)
            # Their pages may have just been taken from a request whose last step is under way.
            event = self._copier.record(stream)
            for move in aside:
                self._batches.put(Batch([move], True, event, is_aside=True))

    def _drop_uncomputed(self) -> None:
        """Of a pass that was started and not ended: it raised."""
        if self._next_saves:
            saves, self._next_saves = self._next_saves, []
            with self._lock:
                self._holed.update(move.request_id for move in saves)
            log.warning("a forward pass failed: KV of %d requests is not saved", len(saves))
            self._end(saves, is_load=False)

    def _wait_saved(self, llm_id: int) -> None:
        with self._lock:
            if not self._lock.wait_for(lambda: not self._saving[llm_id], FENCE_S_MAX):
                raise RuntimeError(f"KV was not copied within {FENCE_S_MAX:g} s")

    def before_layer(self, stream: Any) -> None:
        """A forward pass on another stream than the one that loads were announced on waits too."""
        if self._load_event is not None and stream != self._load_stream:
            stream.wait_event(self._load_event)
            self._load_stream = stream

    def after_forward(self, stream: Any) -> None:
        if self._next_saves:
            saves, self._next_saves = self._next_saves, []
            with self._lock:  # what is behind a hole: "saved" would speak of the hole too
                behind = [move for move in saves if move.request_id in self._holed]
            if behind:
                self._end(behind, is_load=False)
                saves = [move for move in saves if move not in behind]
            self._batches.put(Batch(saves, False, self._copier.record(stream)))

    def finished(self, llm_ids: Sequence[int]) -> list[int]:
        """Whose pages TensorRT-LLM may have back now: at most one request, always the oldest.

        An older executor ends one save an iteration and forgets the others that all ranks are
        done with. Each rank hears of the same requests in the same calls, so with one at a time
        and in their order no two are ever completed in one step, however far ranks are apart.

        Called at the end of each iteration, also of one whose pass raised; then it may be idle.
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

    def loaded(self, llm_ids: Sequence[int]) -> list[int]:
        """Of these and earlier ones: whose load is over, so that they may be computed."""
        with self._lock:
            self._started.extend(llm_ids)
            over = [llm_id for llm_id in self._started if not self._loading[llm_id]]
            self._started = [llm_id for llm_id in self._started if self._loading[llm_id]]
            return over

    # -- the channel's thread

    def on_message(self, message: m.ToConnector) -> None:
        if isinstance(message, m.Drain):
            with self._lock:
                self._draining[message.request_id] = message.moves
                is_over = self._take_drained(message.request_id)
            if is_over:
                self._send(m.Drained(message.request_id, self._pages.rank))
        elif isinstance(message, m.MapSegment):  # locking its pages takes long: nobody waits here
            self._attaching.add(message.region)
            threading.Thread(
                target=self._attach, args=[message], name="kv-attach", daemon=True
            ).start()
        elif isinstance(message, m.UnmapSegment):
            self._batches.put(message)  # behind what is being copied

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
        with self._lock:
            self._attaching.discard(message.region)
            is_unwanted = message.region in self._unwanted
            self._unwanted.discard(message.region)
        if is_unwanted:
            self._batches.put(m.UnmapSegment(message.region))
        self._send(m.SegmentMapped(self._pages.rank, message.region, problem))

    def _detach(self, region: int) -> None:
        with self._lock:
            if region in self._attaching:
                self._unwanted.add(region)
                return
            segment = self._segments.pop(region, None)
        if segment is not None:
            self._copier.remove(region)
            segment.close()

    def close(self) -> None:
        """After what is ordered, or not at all where events are not reached any more."""
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
                except Exception as error:  # Catch all: the worker is notified, not TensorRT-LLM
                    log.exception("copying KV failed")
                    self._is_broken = True  # and nothing is called saved any more
                    self._send(m.Broken(f"rank {self._pages.rank} could not copy KV: {error}"))
            if not batch.is_aside:  # else it never came, and must not be called loaded
                self._end(batch.moves, batch.is_load)
        self._copier.close()
        for segment in self._segments.values():
            segment.close()

    def _load_aside(self, batch: Batch) -> None:
        """A part of it; the rest stands behind what came meanwhile."""
        (move,) = batch.moves
        stop = batch.pages_done + max(1, PART_BYTES_MAX // self._pages.page_bytes)
        part = move._replace(
            first_page=move.first_page + batch.pages_done,
            block_ids=move.block_ids[batch.pages_done : stop],
        )
        self._copier.load_aside(self._pages.runs([part]), batch.event)
        if stop < len(move.block_ids):
            self._batches.put(batch._replace(pages_done=stop))
        else:
            self._believe(batch.moves)
            self._end(batch.moves, is_load=True)

    def _load(self, batch: Batch) -> None:
        if batch.event is not None:
            batch.event.synchronize()
        self._believe(batch.moves)

    def _believe(self, moves: Sequence[Move]) -> None:
        """These loads are over: was it what the worker has verified, to the end?"""
        for move in moves:
            if not all(self._copier.memory.is_still(use) for use in move.uses):
                raise RuntimeError(
                    f"a slot of the storage node was given away while {move.request_id} was loaded "
                    "from it"
                )
            self._send(m.Loaded(move.request_id, self._pages.rank))

    def _save(self, batch: Batch) -> None:
        pages_max = max(1, PART_BYTES_MAX // self._pages.page_bytes)
        for move in batch.moves:
            for start in range(0, len(move.block_ids), pages_max):
                part = move._replace(
                    first_page=move.first_page + start,
                    block_ids=move.block_ids[start : start + pages_max],
                )
                if not self._may_save(part, self._pages.uses(part)):
                    break
                if self._pages.is_saved:
                    self._copier.save(self._pages.runs([part]), batch.event)
                tokens = (part.first_page + len(part.block_ids)) * self._tokens_per_block
                self._send(m.Saved(move.request_id, self._pages.rank, tokens))

    def _may_save(self, move: Move, uses: Sequence[SlotUse]) -> bool:
        with self._lock:
            if move.request_id not in self._given_away:
                if all(self._copier.memory.is_still(use) for use in uses):
                    return True
                log.warning("slots for %s were given away: it is not saved", move.request_id)
                self._given_away.add(move.request_id)
                self._holed.add(move.request_id)
            return False

    def _end(self, moves: Sequence[Move], is_load: bool) -> None:
        """These moves touch nothing any more, whether they went well or not."""
        with self._lock:
            for move in moves:
                self._ended[move.request_id] += 1
                if move.is_aside:
                    self._loading[move.llm_id] -= 1
                    if not self._loading[move.llm_id]:
                        del self._loading[move.llm_id]
                if not is_load:
                    self._saving[move.llm_id] -= 1
                    if not self._saving[move.llm_id]:
                        del self._saving[move.llm_id]
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
