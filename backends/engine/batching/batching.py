"""What the next step of an engine computes, and who gets in.

A request waits (bounded queue, least key first), is admitted (a slot and *all* the pages it can
ever need are its own), is started (its cached or handed-over KV is in those pages) and then takes
part in steps until it is removed.

Reserving every page up front costs capacity when outputs end early, and buys that a running
request never runs out of pages. The conductor counts on that when it predicts. A request at the
head that does not fit holds back the ones behind it: letting small ones pass would starve it.

The key of a prompt is conductor/queue_order.py's: short work first, but ahead of nobody who came
more than queue_wait_s_max before. It orders those that wait and, anew at each step, those that
compute. So a short prompt overtakes a long one between two chunks, also when that one has begun:
all that the long one has computed stays in its pages, so this costs no work, and it is what keeps
a 30 s prompt from being 30 s of waiting for everybody. A step itself is never interrupted. Decode
is first come, first served, except that one level of priority is worth PRIORITY_S of waiting. A
request at the head of decode's queue that lacks pages or a slot gets those of running requests that
go behind it, the last of them first; what they have goes to the store and they wait at their old
places. Places are one order that never changes, so nobody is preempted by somebody that he may
preempt later, nor at all by those that came long enough after him.

Prefill: one step takes at most `chunk_tokens` new tokens, so that it has a bounded length. The
head takes what it needs, the rest of the budget goes to those behind it: several short prompts
share a step, as long as that pays (conductor/queue_order.py). A chunk that is not its
prompt's last ends at the end of a block, so that the block can be handed over at once. While a
prompt that goes before all of these is still being loaded, a step is short: it would keep that one
waiting until its end. Decode: one token of every started request.

Where pages have windows (layer_passes.py) a prompt that is longer than a step passes layer by
layer, and others overtake it between two chunks of a layer. Its step takes as long as any other.
It is passed over while its next layer is not there yet, and gets pages when at most PASSES_AHEAD
like it go before it: who comes later needs them only later. A prompt of WHOLE_STEPS_MAX steps at
most, of which no more than one is new, has pages like a shorter one: there is little to load beside
its computing, and others share its step.

Not here: page memory (kv_memory.py), when to reject (conductor).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from backends.engine.batching.layer_passes import LayerPass, LayerWindows
from backends.engine.batching.pages import PagePool
from conductor.queue_order import ALWAYS, shares_step, short_step_tokens
from mooncake_store.layout import blocks_touched

PASSES_AHEAD = 1  # one is computed, the next one is loaded
WHOLE_STEPS_MAX = 4  # its pages are what a prompt of so many times its length has in windows

PRIORITY_S = 10.0

Place = tuple[float, int, str]  # (key, how many came before, request): the least is next


@dataclass(frozen=True, slots=True)
class Admitted:
    request_id: str
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the tokens [start, start + tokens) of this prompt."""

    request_id: str
    start: int
    tokens: int
    is_last: bool
    layer: int = -1  # in this layer only; -1: in all


@dataclass(slots=True)
class Progress:
    request_id: str
    prompt_tokens: int
    computed_tokens: int


def next_chunks(
    started: Iterable[Progress],
    chunk_tokens: int,
    block_tokens: int,
    overhead_tokens: float = ALWAYS,
    waiting: int = 0,
) -> list[Chunk]:
    """One prefill step for these prompts, in this order of precedence.

    `overhead_tokens`, `waiting`: how much a step costs by itself, and how many more wait for one;
    they decide how many prompts share it (conductor/queue_order.py). By default it is filled.
    """
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
    """Who waits and who has pages; the part that prefill and decode share."""

    def __init__(
        self, pages: PagePool, block_tokens: int, slots_max: int, waiting_max: int
    ) -> None:
        assert min(block_tokens, slots_max, waiting_max) > 0, (block_tokens, slots_max, waiting_max)
        self._pool = pages
        self._block_tokens = block_tokens
        self._slots_max = slots_max
        self._waiting_max = waiting_max
        self._waiting: dict[str, int] = {}  # request -> pages to reserve
        self._resumed: set[str] = set()  # those that a full queue does not refuse
        self._pages: dict[str, list[int]] = {}  # admitted request -> its pages
        self._places: dict[str, Place] = {}  # of all of them
        self._line: list[Place] = []  # a heap of those that wait, and of some that have left
        self._added = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        return len(self._pages)

    @property
    def has_room(self) -> bool:
        """Another request may be added."""
        return len(self._waiting) - len(self._resumed) < self._waiting_max

    def is_waiting(self, request_id: str) -> bool:
        """It was added, and has neither slot nor pages yet."""
        return request_id in self._waiting

    def can_ever_fit(self, tokens: int) -> bool:
        """A request of so many tokens would be admitted by an empty engine."""
        return self._pages_for(tokens) <= self._pool.pages_max

    def _pages_for(self, tokens: int) -> int:
        return blocks_touched(tokens, self._block_tokens)

    def _may_have_pages(self, request_id: str) -> bool:
        """Of the one at the head of the queue, if there are any."""
        return True

    def _add(
        self, request_id: str, pages: int, key_s: float = 0.0, is_resumed: bool = False
    ) -> bool:
        assert request_id not in self._waiting and request_id not in self._pages, request_id
        assert 0 < pages <= self._pool.pages_max, (request_id, pages)
        if is_resumed:
            self._resumed.add(request_id)
        elif not self.has_room:
            return False
        self._waiting[request_id] = pages
        self._added += 1
        self._places[request_id] = place = (key_s, self._added, request_id)
        heapq.heappush(self._line, place)
        return True

    def _next_in_line(self) -> str | None:
        while self._line:
            place = self._line[0]
            if self._places.get(place[2]) == place:
                return place[2]
            heapq.heappop(self._line)  # it was removed while it waited
        return None

    def admit(self, at_most: int | None = None) -> list[Admitted]:
        """Give slots and pages to those at the head of the queue, as far as they go."""
        admitted: list[Admitted] = []
        while len(self._pages) < self._slots_max and len(admitted) != at_most:
            request_id = self._next_in_line()
            if request_id is None or not self._may_have_pages(request_id):
                break
            pages = self._pool.take(self._waiting[request_id])
            if pages is None:
                break
            heapq.heappop(self._line)
            del self._waiting[request_id]
            self._resumed.discard(request_id)
            self._pages[request_id] = pages
            admitted.append(Admitted(request_id, pages))
        return admitted

    def remove(self, request_id: str) -> list[int]:
        """Forget a request, waiting or admitted; its slot is free at once.

        Returns its pages: the caller releases them to the pool when no transfer reads or writes
        them any more.
        """
        del self._places[request_id]
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
        assert self._places.keys() == self._waiting.keys() | self._pages.keys()
        in_line = {place for place in self._line if self._places.get(place[2]) == place}
        assert {place[2] for place in in_line} == self._waiting.keys(), "somebody is never next"
        taken = [page for pages in self._pages.values() for page in pages]
        assert len(taken) == len(set(taken)), "a page belongs to two requests"
        assert len(taken) <= self._pool.used_pages, (len(taken), self._pool.used_pages)


class PrefillBatching(Admission):
    """Chunks of prompts, least key first; equal keys: first come, first served."""

    def __init__(
        self,
        pages: PagePool,
        block_tokens: int,
        chunk_tokens: int,
        slots_max: int,
        waiting_max: int,
        overhead_tokens: float = ALWAYS,
        windows: LayerWindows | None = None,
    ) -> None:
        """`windows`: long prompts pass layer by layer."""
        super().__init__(pages, block_tokens, slots_max, waiting_max)
        self._windows = windows
        self._windowed: set[str] = set()  # of waiting and admitted ones those that do
        self._passes: dict[str, LayerPass] = {}  # of the started ones that do
        assert chunk_tokens >= block_tokens, (chunk_tokens, block_tokens)
        self._chunk_tokens = chunk_tokens
        self._overhead_tokens = overhead_tokens
        self._short_tokens = short_step_tokens(chunk_tokens, block_tokens, overhead_tokens)
        self._prompt_tokens: dict[str, int] = {}  # of waiting and admitted ones
        self._started: dict[str, Progress] = {}
        self._order: list[Place] = []  # of the started ones, sorted
        self._queue_tokens = 0  # of all of them, less what was computed

    @property
    def queue_tokens(self) -> int:
        """Prompt tokens not computed yet; what may still be fetched counts as not computed."""
        return self._queue_tokens

    def add(
        self,
        request_id: str,
        prompt_tokens: int,
        key_s: float = 0.0,
        is_resumed: bool = False,
        near_tokens: int = 0,
    ) -> bool:
        """Queue a request; False, and nothing changes, when the queue is full. One that goes on
        after a loss (`is_resumed`) waits all the same: what it has must not be lost.

        `near_tokens`: in the memory of this node, as far as anybody knows; only how it passes hangs
        on it.
        """
        has_windows = self._has_windows(prompt_tokens, near_tokens)
        pages = self._pages_taken(prompt_tokens, has_windows)
        if not self._add(request_id, pages, key_s, is_resumed):
            return False
        if has_windows:
            self._windowed.add(request_id)
        self._prompt_tokens[request_id] = prompt_tokens
        self._queue_tokens += prompt_tokens
        return True

    def ahead(self, request_id: str) -> int:
        """How many prompts go before this one, those that are being computed included."""
        place = self._places[request_id]
        return sum(
            other < place and not self._is_complete(name) for name, other in self._places.items()
        )

    def _is_complete(self, request_id: str) -> bool:
        progress = self._started.get(request_id)
        return progress is not None and progress.computed_tokens == progress.prompt_tokens

    def start(self, request_id: str, computed_tokens: int, is_loaded: bool = True) -> None:
        """The KV of its first `computed_tokens` tokens is in its pages: compute the rest. One that
        passes layer by layer may start before (`is_loaded`: nothing is to be loaded)."""
        assert request_id in self._pages and request_id not in self._started, request_id
        prompt_tokens = self._prompt_tokens[request_id]
        assert 0 <= computed_tokens < prompt_tokens, (computed_tokens, prompt_tokens)
        if self._windows is not None and self.passes_layers(request_id):
            layers = self._windows.layers
            self._passes[request_id] = LayerPass(
                computed_tokens,
                prompt_tokens,
                self._chunk_tokens,
                layers,
                self._windows.layers_at_once,
                loaded=layers if is_loaded else 0,
            )
        else:
            assert is_loaded, f"{request_id} has pages for all layers"
        self._started[request_id] = Progress(request_id, prompt_tokens, computed_tokens)
        self._queue_tokens -= computed_tokens
        insort(self._order, self._places[request_id])

    def stop(self, request_id: str) -> None:
        """What was computed of it is lost, its pages are not: it will start again."""
        progress = self._started.pop(request_id)
        self._passes.pop(request_id, None)
        self._queue_tokens += progress.computed_tokens
        del self._order[bisect_left(self._order, self._places[request_id])]

    def next_step(self) -> list[Chunk]:
        """What to compute now; changes nothing. Chunks of a layer are all of one prompt."""
        ready = [
            self._started[request_id]
            for _, _, request_id in self._order
            if not self._is_complete(request_id)
            and ((layers := self._passes.get(request_id)) is None or layers.can_compute)
        ]
        tokens = self._chunk_tokens
        if self._is_loading_before(ready[0].request_id if ready else None):
            tokens = self._short_tokens
        if ready and ready[0].request_id in self._passes:
            return self._next_parts(ready[0], tokens)
        in_pages = takewhile(lambda progress: progress.request_id not in self._passes, ready)
        return next_chunks(
            in_pages, tokens, self._block_tokens, self._overhead_tokens, self.waiting
        )

    def _next_parts(self, progress: Progress, tokens: int) -> list[Chunk]:
        of_layers = self._passes[progress.request_id]
        return [
            Chunk(progress.request_id, start, count, start + count == of_layers.end, layer)
            for layer, start, count in of_layers.next_parts(tokens)
        ]

    def _is_loading_before(self, request_id: str | None) -> bool:
        """A prompt that goes before this one, the first that can be computed, has its pages, but
        not yet its KV."""
        if request_id is None or len(self._pages) == len(self._started) - len(self._passes):
            return False
        first = self._places[request_id]
        return any(
            self._places[other] < first
            for other in self._pages
            if other not in self._started
            or ((layers := self._passes.get(other)) is not None and not layers.is_computed)
        )

    def computed(self, chunks: Iterable[Chunk]) -> list[str]:
        """These chunks are done. Returns the requests whose prompts are complete.

        Those keep slot and pages until `remove`: their KV may still be on its way out.
        """
        complete = []
        for chunk in chunks:
            progress = self._started.get(chunk.request_id)
            if progress is None:
                continue  # removed while it was computed
            if chunk.layer < 0:
                assert progress.computed_tokens == chunk.start, (progress, chunk)
                computed_tokens = chunk.start + chunk.tokens
            else:
                of_layers = self._passes[chunk.request_id]
                of_layers.computed(chunk.layer, chunk.start, chunk.tokens)
                computed_tokens = of_layers.start + of_layers.computed_tokens
            self._queue_tokens -= computed_tokens - progress.computed_tokens
            progress.computed_tokens = computed_tokens
            if computed_tokens == progress.prompt_tokens:
                complete.append(chunk.request_id)
        return complete

    # -- prompts that pass layer by layer

    def passes_layers(self, request_id: str) -> bool:
        """It takes windows instead of pages."""
        return request_id in self._windowed

    def _has_windows(self, tokens: int, near_tokens: int = 0) -> bool:
        if self._windows is None or tokens <= self._chunk_tokens:
            return False
        is_near_its_end = tokens - near_tokens <= self._chunk_tokens
        has_pages = super()._pages_for(tokens) <= self._pool.pages_max
        is_short = tokens <= WHOLE_STEPS_MAX * self._chunk_tokens
        return not (is_near_its_end and is_short and has_pages)

    def _pages_for(self, tokens: int) -> int:
        return self._pages_taken(tokens, self._has_windows(tokens))

    def _pages_taken(self, tokens: int, has_windows: bool) -> int:
        blocks = super()._pages_for(tokens)
        if not has_windows:
            return blocks
        assert self._windows is not None
        return self._windows.pages_for(blocks)

    def _may_have_pages(self, request_id: str) -> bool:
        if not self.passes_layers(request_id):
            return True
        place = self._places[request_id]
        ahead = (
            other
            for other in self._pages
            if self.passes_layers(other) and not self._is_complete(other)
        )
        return sum(self._places[other] < place for other in ahead) <= PASSES_AHEAD

    def goes_before(self, request_id: str, other: str) -> bool:
        return self._places[request_id] < self._places[other]

    def layers_to_load(self) -> list[tuple[str, int]]:
        """(request, layer) that may be loaded now, whose prompt is next first."""
        return [
            (request_id, of_layers.loaded)
            for _, _, request_id in self._order
            if (of_layers := self._passes.get(request_id)) is not None and of_layers.can_load
        ]

    def layer_loaded(self, request_id: str) -> None:
        """The prefix of its next layer is in its windows."""
        self._passes[request_id].loaded += 1

    def layer_stored(self, request_id: str) -> None:
        """What was computed and loaded of its next layer is in the store."""
        if (of_layers := self._passes.get(request_id)) is not None:
            of_layers.stored += 1

    def remove(self, request_id: str) -> list[int]:
        if request_id in self._started:
            self.stop(request_id)
        self._queue_tokens -= self._prompt_tokens.pop(request_id)
        self._windowed.discard(request_id)
        return super().remove(request_id)

    def check(self) -> None:
        super().check()
        assert self._prompt_tokens.keys() == self._waiting.keys() | self._pages.keys()
        assert self._started.keys() <= self._pages.keys(), "started without pages"
        computed = sum(progress.computed_tokens for progress in self._started.values())
        assert self._queue_tokens == sum(self._prompt_tokens.values()) - computed, "miscounted"
        assert self._order == sorted(self._places[request_id] for request_id in self._started)
        for request_id, progress in self._started.items():
            assert 0 <= progress.computed_tokens <= progress.prompt_tokens, progress
            pages = len(self._pages[request_id])
            taken = self._pages_taken(progress.prompt_tokens, self.passes_layers(request_id))
            assert pages == taken, (progress, pages)
            if (of_layers := self._passes.get(request_id)) is not None:
                of_layers.check()
        assert self._passes.keys() <= self._started.keys(), "a pass of nobody"
        assert self._windowed <= self._prompt_tokens.keys(), "windows of nobody"


class DecodeBatching(Admission):
    """One token of each started request per step; first come, first served."""

    def __init__(
        self, pages: PagePool, block_tokens: int, slots_max: int, waiting_max: int
    ) -> None:
        super().__init__(pages, block_tokens, slots_max, waiting_max)
        self._tokens_max: dict[str, int] = {}  # prompt and longest output, of all requests
        self._started: dict[str, int] = {}  # request -> tokens it has; in order of start
        self._saving: dict[str, int] = {}  # preempted request -> pages that it still has
        self._context_tokens = 0  # of all of these

    @property
    def running(self) -> int:
        return len(self._started)

    @property
    def context_tokens(self) -> int:
        """KV tokens that the next step reads."""
        return self._context_tokens

    def add(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens_max: int,
        is_resumed: bool = False,
        came_s: float = 0.0,
    ) -> bool:
        """Queue a request; False, and nothing changes, when the queue is full. One that goes on
        after a loss (`is_resumed`) waits all the same: what it has must not be lost."""
        assert prompt_tokens > 0 and output_tokens_max > 0, (prompt_tokens, output_tokens_max)
        tokens = prompt_tokens + output_tokens_max
        if not self._add(request_id, self._pages_for(tokens), came_s, is_resumed):
            return False
        self._tokens_max[request_id] = prompt_tokens + output_tokens_max
        return True

    def start(self, request_id: str, tokens: int) -> None:
        """Its KV is in its pages and it has `tokens` tokens, prompt and output: join the batch."""
        assert request_id in self._pages and request_id not in self._started, request_id
        assert 0 < tokens <= self._tokens_max[request_id], (tokens, self._tokens_max[request_id])
        self._started[request_id] = tokens
        self._context_tokens += tokens

    def prioritise(self, request_id: str, priority: int) -> None:
        """One that was added already has this priority, it is heard now."""
        came_s, added, _ = self._places[request_id]
        self._places[request_id] = place = (came_s - priority * PRIORITY_S, added, request_id)
        if request_id in self._waiting:
            heapq.heappush(self._line, place)

    def to_preempt(self) -> list[str]:
        """Running requests that must go so that the head of the queue gets in, the last first;
        empty while others' pages are on their way, and unless it gets in then."""
        head = self._next_in_line()
        if head is None or head in self._saving:
            return []
        lacks_slot = len(self._pages) >= self._slots_max
        lacking = self._waiting[head] - self._pool.free_pages - sum(self._saving.values())
        if lacking <= 0 and not lacks_slot:
            return []
        chosen = []
        behind = [place for name in self._started if (place := self._places[name])]
        for place in sorted(behind, reverse=True):
            if place < self._places[head] or (chosen and lacking <= 0):
                break
            chosen.append(place[2])
            lacking -= len(self._pages[place[2]])
        return chosen if lacking <= 0 else []

    def preempt(self, request_id: str) -> list[int]:
        """A running request waits again. Its pages, which are its own until `saved`."""
        pages = self._pages.pop(request_id)
        self._context_tokens -= self._started.pop(request_id)
        self._saving[request_id] = len(pages)
        self._waiting[request_id] = len(pages)
        self._resumed.add(request_id)
        heapq.heappush(self._line, self._places[request_id])
        return pages

    def saved(self, request_id: str) -> None:
        """Its pages are free, or soon: it may have others."""
        self._saving.pop(request_id, None)

    def _may_have_pages(self, request_id: str) -> bool:
        return request_id not in self._saving

    def next_step(self) -> list[str]:
        """The requests that get a token now; changes nothing."""
        return list(self._started)

    def computed(self, request_ids: Iterable[str]) -> None:
        """Each of these has one more token."""
        for request_id in request_ids:
            if request_id in self._started:  # else removed while it was computed
                self._started[request_id] += 1
                self._context_tokens += 1
                assert self._started[request_id] <= self._tokens_max[request_id], request_id

    def steps_alike(self, tokens_at_end: Mapping[str, int]) -> int:
        """How many steps compute these very requests, until the first has all its tokens.

        `tokens_at_end`: what each will have, prompt and output. An engine learns that from the
        tokens; a simulator knows it before, and takes that many steps at once. 0: nobody started.
        """
        left = (tokens_at_end[name] - tokens for name, tokens in self._started.items())
        return min(left, default=0)

    def advance(self, steps: int) -> None:
        """As `computed(next_step())`, `steps` times."""
        tokens_max, started = self._tokens_max, self._started
        for request_id, tokens in started.items():
            assert tokens + steps <= tokens_max[request_id], (request_id, tokens, steps)
            started[request_id] = tokens + steps
        self._context_tokens += steps * len(started)

    def remove(self, request_id: str) -> list[int]:
        pages = super().remove(request_id)
        self._saving.pop(request_id, None)
        self._tokens_max.pop(request_id)
        self._context_tokens -= self._started.pop(request_id, 0)
        return pages

    def check(self) -> None:
        super().check()
        assert self._tokens_max.keys() == self._waiting.keys() | self._pages.keys()
        assert self._started.keys() <= self._pages.keys(), "started without pages"
        assert self._context_tokens == sum(self._started.values()), "tokens are miscounted"
        assert self._saving.keys() <= self._waiting.keys(), "who is preempted waits"
        for request_id, tokens in self._started.items():
            room_tokens = len(self._pages[request_id]) * self._block_tokens
            assert tokens <= self._tokens_max[request_id] <= room_tokens, (request_id, tokens)
