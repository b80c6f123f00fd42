"""Continuous batching with chunked prefill: admits requests and plans the engine's next step.

States of a request:

    waiting    is in the queue and owns no pages
    admitted   owns a request slot and *all* pages that it can ever need
    started    takes part in steps

All pages are reserved at admission, so a running request never runs out of pages. The conductor's
predictions rely on this rule. Reserved pages stay unused when an output ends early. If the head of
the queue does not fit, no later request is admitted, because small requests would starve the head.

Prefill order: shortest job first with ageing, by the order keys of conductor/queue_order.py. The
order applies to waiting prompts and, at each step, to started prompts. So a short prompt overtakes
a long one between two chunks of the long prompt. The long prompt keeps its pages and computed KV. A
running step is never interrupted.

Prefill step: a step computes at most `chunk_tokens` tokens, which bounds the duration of the step.
The first prompt takes as many as it needs. Further prompts share the step while `shares_step`
(conductor/queue_order.py) accepts them. A chunk that does not end its prompt ends at a block
boundary, so that its blocks are complete and can be stored. A step has fewer tokens while a prompt
earlier in the order waits for a KV transfer, because the step may delay that prompt.

Layer-wise prefill (layer_passes.py): a prompt of more than `chunk_tokens` tokens is computed layer
by layer. Its KV is in layer ring buffers, which take fewer pages than all layers of its blocks. The
prompt takes part in a step only if its next layer is loaded and the ring buffers have room for that
layer. Between the steps, other prompts can overtake it. A layer-wise prompt is admitted when at
most LAYERWISE_AHEAD_MAX unfinished layer-wise prompts are before it in the order. Exception: a
mostly cached prompt that is not too long is prefilled in chunks, so that it can share a step.

Decode: each step computes one token of every started request. The queue is first come, first
served, and a level of priority counts as PRIORITY_S of waiting. If the head of the queue lacks
pages or a slot, running requests after the head in this order are preempted, the last one first.
The KV of a preempted request moves to the store, and the request waits at its old queue position.
The order does not change after `prioritise`, so two requests never preempt each other in turn.

Not here: the memory of the pages (kv_memory.py), rejection by predicted load (conductor/).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from backends.engine.batching.layer_passes import LayerPass, RingLayout
from backends.engine.batching.pages import PagePool
from conductor.queue_order import ALWAYS, shares_step, short_step_tokens
from mooncake_store.layout import blocks_touched

LAYERWISE_AHEAD_MAX = 1  # one layer-wise prompt is computed while the next one loads its prefix
WHOLE_STEPS_MAX = 4  # a mostly cached prompt of up to so many `chunk_tokens` is not layer-wise

PRIORITY_S = 10.0  # seconds of waiting that equal one level of priority

QueuePosition = tuple[float, int, str]  # (order key in s, number of its `_add`, request id)


@dataclass(frozen=True, slots=True)
class Admitted:
    request_id: str
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the tokens [start, start + tokens) of one prompt."""

    request_id: str
    start: int  # position of the chunk's first token in the prompt
    tokens: int  # >= 1
    is_last: bool  # the chunk ends with the prompt's last token
    layer: int = -1  # the only layer to compute; -1: all layers


@dataclass(slots=True)
class Progress:
    request_id: str
    prompt_tokens: int
    computed_tokens: int  # includes the cached prefix; 0 <= computed_tokens <= prompt_tokens


def next_chunks(
    started: Iterable[Progress],
    chunk_tokens: int,
    block_tokens: int,
    overhead_tokens: float = ALWAYS,
    waiting: int = 0,
) -> list[Chunk]:
    """Plan one chunked-prefill step.

    `started`: prompts in queue order. `overhead_tokens`: the fixed time of a step, as the number of
    tokens computed in that time. ALWAYS: prompts share the step until `chunk_tokens` is reached.
    `waiting`: number of prompts that wait for admission."""
    assert chunk_tokens >= block_tokens, f"{chunk_tokens} tokens a step, {block_tokens} a block"
    chunks: list[Chunk] = []
    budget = chunk_tokens
    todo = [progress for progress in started if progress.computed_tokens < progress.prompt_tokens]
    for progress in todo:
        start = progress.computed_tokens
        end = min(progress.prompt_tokens, start + budget)
        if end < progress.prompt_tokens:
            end -= end % block_tokens
        if end <= start:
            break
        is_last = end == progress.prompt_tokens
        behind, tokens = waiting + len(todo) - len(chunks), end - start if is_last else chunk_tokens
        if chunks and not shares_step(len(chunks), behind, tokens, overhead_tokens):
            break
        chunks.append(Chunk(progress.request_id, start, end - start, is_last))
        budget -= end - start
        if budget == 0 or not is_last:
            break
    return chunks


class Admission:
    """Request queue, slots and page reservation; the common part of prefill and decode."""

    def __init__(
        self, pages: PagePool, block_tokens: int, slots_max: int, waiting_max: int
    ) -> None:
        assert min(block_tokens, slots_max, waiting_max) > 0, (block_tokens, slots_max, waiting_max)
        self._pool = pages
        self._block_tokens = block_tokens
        self._slots_max = slots_max
        self._waiting_max = waiting_max
        self._waiting: dict[str, int] = {}  # request -> pages to reserve
        # Waiting requests that were resumed or preempted. They do not count against waiting_max.
        self._resumed: set[str] = set()
        self._pages: dict[str, list[int]] = {}  # admitted request -> its pages
        self._positions: dict[str, QueuePosition] = {}  # of waiting and admitted requests
        # Heap of the waiting requests. It also holds outdated entries, which `_head` removes.
        self._heap: list[QueuePosition] = []
        self._added = 0  # number of requests added since construction

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        return len(self._pages)

    @property
    def has_room(self) -> bool:
        """Whether a new request may be added. A resumed request may always be added."""
        return len(self._waiting) - len(self._resumed) < self._waiting_max

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def _may_have_pages(self, request_id: str) -> bool:
        """Whether this request, the head of the queue, may be admitted if enough pages are free."""
        return True

    def _add(
        self, request_id: str, pages: int, order_key_s: float = 0.0, is_resumed: bool = False
    ) -> bool:
        assert request_id not in self._waiting and request_id not in self._pages, request_id
        assert 0 < pages <= self._pool.pages_max, (request_id, pages)
        if is_resumed:
            self._resumed.add(request_id)
        elif not self.has_room:
            return False
        self._waiting[request_id] = pages
        self._added += 1
        self._positions[request_id] = position = (order_key_s, self._added, request_id)
        heapq.heappush(self._heap, position)
        return True

    def _head(self) -> str | None:
        while self._heap:
            position = self._heap[0]
            if self._positions.get(position[2]) == position:
                return position[2]
            heapq.heappop(self._heap)  # outdated: removed, or moved by `prioritise`
        return None

    def admit(self, at_most: int | None = None) -> list[Admitted]:
        """Admit at most `at_most` requests from the head of the queue. Stop if one does not fit."""
        admitted: list[Admitted] = []
        while len(self._pages) < self._slots_max and len(admitted) != at_most:
            request_id = self._head()
            if request_id is None or not self._may_have_pages(request_id):
                break
            pages = self._pool.take(self._waiting[request_id])
            if pages is None:
                break
            heapq.heappop(self._heap)
            del self._waiting[request_id]
            self._resumed.discard(request_id)
            self._pages[request_id] = pages
            admitted.append(Admitted(request_id, pages))
        return admitted

    def remove(self, request_id: str) -> list[int]:
        """Forget a waiting or admitted request and free its slot at once.

        Returns the pages of the request; [] if it was waiting. The caller releases the pages to the
        pool after the last transfer from or to the pages.
        """
        del self._positions[request_id]
        self._resumed.discard(request_id)
        if request_id in self._waiting:
            del self._waiting[request_id]
            return []
        return self._pages.pop(request_id)

    def check(self) -> None:
        assert self._resumed <= self._waiting.keys(), self._resumed
        new = len(self._waiting) - len(self._resumed)
        assert new <= self._waiting_max, new
        assert len(self._pages) <= self._slots_max, len(self._pages)
        assert not self._waiting.keys() & self._pages.keys(), "waiting and admitted"
        assert self._positions.keys() == self._waiting.keys() | self._pages.keys()
        current = (key for key in self._heap if self._positions.get(key[2]) == key)
        in_heap = {request_id for _, _, request_id in current}
        assert in_heap == self._waiting.keys(), "a waiting request is not in the heap"
        taken = [page for pages in self._pages.values() for page in pages]
        assert len(taken) == len(set(taken)), "a page belongs to two requests"
        assert len(taken) <= self._pool.used_pages, (len(taken), self._pool.used_pages)


class PrefillBatching(Admission):
    """Plans prefill steps. Prompts run in the order of their order keys, then of their arrival."""

    def __init__(
        self,
        pages: PagePool,
        block_tokens: int,
        chunk_tokens: int,
        slots_max: int,
        waiting_max: int,
        overhead_tokens: float = ALWAYS,
        rings: RingLayout | None = None,
    ) -> None:
        """`rings`: layout of the layer ring buffers; None: no layer-wise prefill."""
        super().__init__(pages, block_tokens, slots_max, waiting_max)
        self._rings = rings
        self._layerwise: set[str] = set()  # waiting and admitted prompts that use ring buffers
        self._passes: dict[str, LayerPass] = {}  # one for each started layer-wise prompt
        assert chunk_tokens >= block_tokens, (chunk_tokens, block_tokens)
        self._chunk_tokens = chunk_tokens
        self._overhead_tokens = overhead_tokens
        self._short_tokens = short_step_tokens(chunk_tokens, block_tokens, overhead_tokens)
        self._prompt_tokens: dict[str, int] = {}  # length of each waiting and admitted prompt
        self._started: dict[str, Progress] = {}
        self._order: list[QueuePosition] = []  # of started prompts, sorted
        # Prompt tokens not yet computed; >= 0. Includes the cached prefix of unstarted prompts.
        self.queue_tokens = 0

    def add(
        self,
        request_id: str,
        prompt_tokens: int,
        order_key_s: float = 0.0,
        is_resumed: bool = False,
        local_tokens: int = 0,
    ) -> bool:
        """Queue a prompt. Returns False and changes nothing if the queue is full.

        `is_resumed`: the request resumes here after a worker failure. A full queue does not reject
        such a request. `local_tokens`: estimated number of tokens whose KV is cached on this node.
        The estimate only decides between layer-wise and chunked prefill.
        """
        has_rings = self._has_rings(prompt_tokens, local_tokens)
        pages = self._pages_taken(prompt_tokens, has_rings)
        if not self._add(request_id, pages, order_key_s, is_resumed):
            return False
        if has_rings:
            self._layerwise.add(request_id)
        self._prompt_tokens[request_id] = prompt_tokens
        self.queue_tokens += prompt_tokens
        return True

    def ahead(self, request_id: str) -> int:
        """Number of prompts before this one in the order that are not computed completely."""
        unfinished = (name for name in self._positions if not self._is_complete(name))
        return sum(self.goes_before(name, request_id) for name in unfinished)

    def _is_complete(self, request_id: str) -> bool:
        progress = self._started.get(request_id)
        return progress is not None and progress.computed_tokens == progress.prompt_tokens

    def start(self, request_id: str, computed_tokens: int, is_loaded: bool = True) -> None:
        """Let an admitted prompt take part in steps, from token `computed_tokens` on.

        `is_loaded`: whether the KV of all earlier tokens is in the prompt's pages. A layer-wise
        prompt may start with False, because its prefix is then loaded layer by layer."""
        assert request_id in self._pages and request_id not in self._started, request_id
        prompt_tokens = self._prompt_tokens[request_id]
        assert 0 <= computed_tokens < prompt_tokens, (computed_tokens, prompt_tokens)
        if self._rings is not None and self.is_layerwise(request_id):
            layers = self._rings.layers
            self._passes[request_id] = LayerPass(
                computed_tokens,
                prompt_tokens,
                self._chunk_tokens,
                layers,
                self._rings.layers_at_once,
                loaded=layers if is_loaded else 0,
            )
        else:
            assert is_loaded, f"{request_id} is not layer-wise, its whole prefix must be loaded"
        self._started[request_id] = Progress(request_id, prompt_tokens, computed_tokens)
        self.queue_tokens -= computed_tokens
        insort(self._order, self._positions[request_id])

    def stop(self, request_id: str) -> None:
        """Return a started prompt to the admitted state, with its pages but no computed tokens."""
        progress = self._started.pop(request_id)
        self._passes.pop(request_id, None)
        self.queue_tokens += progress.computed_tokens
        del self._order[bisect_left(self._order, self._positions[request_id])]

    def next_step(self) -> list[Chunk]:
        """The chunks of the next step, or []. A step with layer-wise chunks has only one prompt."""
        ready = [
            self._started[request_id]
            for _, _, request_id in self._order
            if not self._is_complete(request_id)
            and ((layers := self._passes.get(request_id)) is None or layers.can_compute)
        ]
        tokens = self._chunk_tokens
        if self._is_loading_before(ready[0].request_id if ready else None):
            tokens = self._short_tokens
        if ready and (of_layers := self._passes.get(ready[0].request_id)) is not None:
            name, end = ready[0].request_id, ready[0].prompt_tokens
            return [
                Chunk(name, start, count, start + count == end, layer)
                for layer, start, count in of_layers.next_parts(tokens)
            ]
        in_pages = takewhile(lambda progress: progress.request_id not in self._passes, ready)
        return next_chunks(
            in_pages, tokens, self._block_tokens, self._overhead_tokens, self.waiting
        )

    def _is_loading_before(self, request_id: str | None) -> bool:
        """Whether an admitted prompt before this one waits until KV is loaded or stored."""
        if request_id is None or len(self._pages) == len(self._started) - len(self._passes):
            return False
        first = self._positions[request_id]
        return any(
            self._positions[other] < first
            for other in self._pages
            if other not in self._started
            or ((layers := self._passes.get(other)) is not None and not layers.is_computed)
        )

    def computed(self, chunks: Iterable[Chunk]) -> list[str]:
        """Record computed chunks. Returns the requests whose prompts are now complete.

        A complete prompt keeps its slot and pages until `remove`, because its KV may still be in
        transfer to the store.
        """
        complete = []
        for chunk in chunks:
            progress = self._started.get(chunk.request_id)
            if progress is None:
                continue  # the request was removed during the step
            if chunk.layer < 0:
                assert progress.computed_tokens == chunk.start, (progress, chunk)
                computed_tokens = chunk.start + chunk.tokens
            else:
                of_layers = self._passes[chunk.request_id]
                of_layers.computed(chunk.layer, chunk.start, chunk.tokens)
                computed_tokens = of_layers.start + of_layers.computed_tokens
            self.queue_tokens -= computed_tokens - progress.computed_tokens
            progress.computed_tokens = computed_tokens
            if computed_tokens == progress.prompt_tokens:
                complete.append(chunk.request_id)
        return complete

    # -- layer-wise prefill

    def is_layerwise(self, request_id: str) -> bool:
        return request_id in self._layerwise

    def _has_rings(self, tokens: int, local_tokens: int) -> bool:
        if self._rings is None or tokens <= self._chunk_tokens:
            return False
        is_mostly_cached = tokens - local_tokens <= self._chunk_tokens
        has_pages = blocks_touched(tokens, self._block_tokens) <= self._pool.pages_max
        is_short = tokens <= WHOLE_STEPS_MAX * self._chunk_tokens
        return not (is_mostly_cached and is_short and has_pages)

    def _pages_taken(self, tokens: int, has_rings: bool) -> int:
        blocks = blocks_touched(tokens, self._block_tokens)
        return self._rings.pages_for(blocks) if has_rings and self._rings is not None else blocks

    def _may_have_pages(self, request_id: str) -> bool:
        if not self.is_layerwise(request_id):
            return True
        admitted = self._layerwise & self._pages.keys()
        unfinished = (other for other in admitted if not self._is_complete(other))
        ahead = sum(self.goes_before(other, request_id) for other in unfinished)
        return ahead <= LAYERWISE_AHEAD_MAX

    def goes_before(self, request_id: str, other: str) -> bool:
        return self._positions[request_id] < self._positions[other]

    def layers_to_load(self) -> list[tuple[str, int]]:
        """Each (request, layer) whose cached prefix may be loaded now, in queue order."""
        return [
            (request_id, of_layers.loaded)
            for _, _, request_id in self._order
            if (of_layers := self._passes.get(request_id)) is not None and of_layers.can_load
        ]

    def layer_loaded(self, request_id: str) -> None:
        """Record that the cached prefix of one more layer is in the ring buffers."""
        self._passes[request_id].loaded += 1

    def layer_stored(self, request_id: str) -> None:
        """Record that the KV of one more layer is stored. No effect for an unstarted request."""
        if (of_layers := self._passes.get(request_id)) is not None:
            of_layers.stored += 1

    def remove(self, request_id: str) -> list[int]:
        if request_id in self._started:
            self.stop(request_id)
        self.queue_tokens -= self._prompt_tokens.pop(request_id)
        self._layerwise.discard(request_id)
        return super().remove(request_id)

    def check(self) -> None:
        super().check()
        assert self._prompt_tokens.keys() == self._waiting.keys() | self._pages.keys()
        assert self._started.keys() <= self._pages.keys(), "started without pages"
        computed = sum(progress.computed_tokens for progress in self._started.values())
        assert self.queue_tokens == sum(self._prompt_tokens.values()) - computed, "miscounted"
        assert self._order == sorted(self._positions[request_id] for request_id in self._started)
        for request_id, progress in self._started.items():
            assert 0 <= progress.computed_tokens <= progress.prompt_tokens, progress
            pages = len(self._pages[request_id])
            taken = self._pages_taken(progress.prompt_tokens, self.is_layerwise(request_id))
            assert pages == taken, (progress, pages)
            if (of_layers := self._passes.get(request_id)) is not None:
                of_layers.check()
        assert self._passes.keys() <= self._started.keys(), "a layer pass without its request"
        assert self._layerwise <= self._prompt_tokens.keys(), "layer-wise without a request"


class DecodeBatching(Admission):
    """Plans decode steps: each step computes one token of every started request."""

    def __init__(
        self, pages: PagePool, block_tokens: int, slots_max: int, waiting_max: int
    ) -> None:
        super().__init__(pages, block_tokens, slots_max, waiting_max)
        self._tokens_max: dict[str, int] = {}  # request -> prompt tokens + largest output tokens
        self._started: dict[str, int] = {}  # request -> prompt and output tokens so far
        self._saving: dict[str, int] = {}  # preempted request -> number of pages being saved
        self.context_tokens = 0  # prompt and output tokens of all started requests

    @property
    def running(self) -> int:
        return len(self._started)

    def add(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens_max: int,
        is_resumed: bool = False,
        arrived_s: float = 0.0,
    ) -> bool:
        """Queue a request. Returns False and changes nothing if the queue is full. A full queue
        does not reject a request that resumes after a worker failure (`is_resumed`)."""
        assert prompt_tokens > 0 and output_tokens_max > 0, (prompt_tokens, output_tokens_max)
        tokens = prompt_tokens + output_tokens_max
        pages = blocks_touched(tokens, self._block_tokens)
        if not self._add(request_id, pages, arrived_s, is_resumed):
            return False
        self._tokens_max[request_id] = tokens
        return True

    def start(self, request_id: str, tokens: int) -> None:
        """Add an admitted request to the batch. `tokens`: number of its prompt and output tokens.
        The KV of all of them except the last one is in the request's pages."""
        assert request_id in self._pages and request_id not in self._started, request_id
        assert 0 < tokens <= self._tokens_max[request_id], (tokens, self._tokens_max[request_id])
        self._started[request_id] = tokens
        self.context_tokens += tokens

    def prioritise(self, request_id: str, priority: int) -> None:
        """Move a request in the queue by PRIORITY_S per level. At most once, before `start`."""
        arrived_s, added, _ = self._positions[request_id]
        order_key_s = arrived_s - priority * PRIORITY_S
        self._positions[request_id] = position = (order_key_s, added, request_id)
        if request_id in self._waiting:
            heapq.heappush(self._heap, position)

    def to_preempt(self) -> list[str]:
        """The running requests to preempt so that the head of the queue fits, the last one first.

        Only requests after the head in the order are preempted. The list is empty if the head will
        fit when the saves in progress end, or if the head's own KV is still being saved. It is also
        empty if preempting all requests after the head would not be enough.
        """
        head = self._head()
        if head is None or head in self._saving:
            return []
        lacks_slot = len(self._pages) >= self._slots_max
        lacking = self._waiting[head] - self._pool.free_pages - sum(self._saving.values())
        if lacking <= 0 and not lacks_slot:
            return []
        chosen = []
        for position in sorted((self._positions[name] for name in self._started), reverse=True):
            if position < self._positions[head] or (chosen and lacking <= 0):
                break
            chosen.append(position[2])
            lacking -= len(self._pages[position[2]])
        return chosen if lacking <= 0 else []

    def preempt(self, request_id: str) -> list[int]:
        """Queue a running request again. Returns its pages; call `saved` after saving their KV."""
        pages = self._pages.pop(request_id)
        self.context_tokens -= self._started.pop(request_id)
        self._saving[request_id] = len(pages)
        self._waiting[request_id] = len(pages)
        self._resumed.add(request_id)
        heapq.heappush(self._heap, self._positions[request_id])
        return pages

    def saved(self, request_id: str) -> None:
        """Record that the save of a preempted request's KV ended; then it can be admitted again."""
        self._saving.pop(request_id, None)

    def _may_have_pages(self, request_id: str) -> bool:
        return request_id not in self._saving

    def next_step(self) -> list[str]:
        """The requests that get a token in the next step. Changes nothing."""
        return list(self._started)

    def computed(self, request_ids: Iterable[str]) -> None:
        """Add one token to each of these requests."""
        for request_id in request_ids:
            if request_id in self._started:  # else removed during the step
                self._started[request_id] += 1
                self.context_tokens += 1
                assert self._started[request_id] <= self._tokens_max[request_id], request_id

    def steps_alike(self, tokens_at_end: Mapping[str, int]) -> int:
        """Number of steps until the first started request is complete; 0 if none is started.

        `tokens_at_end`: request -> its final number of prompt and output tokens. Only a simulator
        has these numbers in advance.
        """
        left = (tokens_at_end[name] - tokens for name, tokens in self._started.items())
        return min(left, default=0)

    def advance(self, steps: int) -> None:
        """Has the effect of `steps` calls of `computed(next_step())`."""
        tokens_max, started = self._tokens_max, self._started
        for request_id, tokens in started.items():
            assert tokens + steps <= tokens_max[request_id], (request_id, tokens, steps)
            started[request_id] = tokens + steps
        self.context_tokens += steps * len(started)

    def remove(self, request_id: str) -> list[int]:
        pages = super().remove(request_id)
        self._saving.pop(request_id, None)
        self._tokens_max.pop(request_id)
        self.context_tokens -= self._started.pop(request_id, 0)
        return pages

    def check(self) -> None:
        super().check()
        assert self._tokens_max.keys() == self._waiting.keys() | self._pages.keys()
        assert self._started.keys() <= self._pages.keys(), "started without pages"
        assert self.context_tokens == sum(self._started.values()), "tokens are miscounted"
        assert self._saving.keys() <= self._waiting.keys(), "a preempted request does not wait"
        for request_id, tokens in self._started.items():
            room_tokens = len(self._pages[request_id]) * self._block_tokens
            assert tokens <= self._tokens_max[request_id] <= room_tokens, (request_id, tokens)
