"""A small executor that calls connectors in the documented order, and computes a kv_model.py.

    executor = Executor(args, KvShape(...))
    executor.submit(LlmRequest(1, [5, 6, 7], max_tokens=4, on_output=...))
    executor.run_until_idle()                 # a test's way; or
    executor.start(); ...; executor.shutdown()   # in a thread, as an LLM does

One iteration: take requests in, schedule, prepare (match, allocate), connectors' metadata, loads,
forward, wait_for_save, hand out tokens (overlap: of the iteration before), finish requests,
get_finished. Without work it blocks. The forward pass runs on a FakeStream, so it is late.

Left out: sampling parameters (everything is greedy), eviction of running requests, layer-wise
timing (a token's KV is written by one piece of work, after the pre-hooks of all layers).
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from tensorrt_llm._fake.api import HAS_NEW_API
from tensorrt_llm._fake.blocks import BlockManager
from tensorrt_llm._fake.connectors import Connectors
from tensorrt_llm._fake.kv_model import (
    KvShape,
    RankModel,
    advance,
    next_state,
    next_token,
    whole_sum,
)
from tensorrt_llm._fake.request import LlmRequest, State
from tensorrt_llm._fake.stats import iteration_stats
from tensorrt_llm._fake.stream import FakeEvent, FakeStream
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

DEFAULT_KV_TOKENS = 4096
IDLE_WAIT_S = 0.001
Part = tuple[LlmRequest, int, int]  # computes `count` tokens from `start` on
Launched = tuple[list[Part], dict[int, int], FakeEvent]  # sampled tokens, once the event is reached
IterationStats = dict[str, Any]


class Executor:
    aborts_are_told = True  # False: a cancelled request's pages go without request_finished
    passes_to_fail = 0  # from the next one on
    stores_uncomputed = (
        False  # True: as before 1.3.0rc14, a cancelled prompt's pages are all reused
    )
    loads_max_tokens: int | None = None  # of an offer; only V2 may take less than all

    def __init__(self, args: TorchLlmArgs, shape: KvShape) -> None:
        cache = args.kv_cache_config
        assert cache.tokens_per_block == shape.tokens_per_block, (cache, shape)
        self.args, self.shape = args, shape
        self.blocks = BlockManager(
            (cache.max_tokens or DEFAULT_KV_TOKENS) // shape.tokens_per_block,
            shape.tokens_per_block,
            cache.enable_block_reuse,
        )
        self.stream = FakeStream()
        tp_size = args.tensor_parallel_size
        self.ranks = [RankModel(shape, r, tp_size, self.blocks.blocks) for r in range(tp_size)]
        self.connectors = Connectors(args) if args.kv_connector_config is not None else None
        self.is_v2 = cache.is_v2
        if self.connectors is not None:
            self.connectors.register(self.ranks)
        self.iterations = 0
        self.stats: deque[IterationStats] = deque(maxlen=1000)
        self._lock = threading.Condition()
        self._arrived: deque[LlmRequest] = deque()
        self._waiting: deque[LlmRequest] = deque()
        self._active: list[LlmRequest] = []
        self._previous: Launched | None = None
        self._completed = 0
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    # -- from other threads

    def submit(self, request: LlmRequest) -> None:
        if request.kind == "generation_only" and self.connectors is not None:
            raise RuntimeError("Connector API is not supported for generation-only requests!")
        limit = self.args.max_seq_len or self.blocks.blocks * self.shape.tokens_per_block
        if not request.prompt or len(request.prompt) + request.max_tokens > limit:
            raise ValueError(f"prompt and max_tokens must be 1 to {limit} tokens")
        with self._lock:
            if self._is_stopping:
                raise RuntimeError("the executor is shut down")
            self._arrived.append(request)
            self._lock.notify_all()

    def abort(self, request: LlmRequest) -> None:
        with self._lock:
            request.is_aborted = True
            self._lock.notify_all()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="fake-executor", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """Ends what runs, as cancelled, and does not wait for saves."""
        with self._lock:
            self._is_stopping = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(30.0)
        self.stream.close()

    def run_until_idle(self, iterations_max: int = 10_000) -> None:
        for _ in range(iterations_max):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {iterations_max} iterations")

    @property
    def has_work(self) -> bool:
        waits = self.connectors is not None and (self.connectors.saving or self.connectors.loading)
        return bool(self._arrived or self._waiting or self._active or self._previous or waits)

    def _loop(self) -> None:
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._is_stopping or self.has_work)
                    if self._is_stopping:
                        break
                self.step()
        except BaseException as error:  # what an executor's error does to everybody
            self.error = error
        left = [*self._arrived, *self._waiting, *self._active]
        for request in left:
            request.on_output([], "cancelled")

    # -- one iteration

    def step(self) -> None:
        self.iterations += 1
        with self._lock:
            self._waiting.extend(self._arrived)
            self._arrived.clear()
        self._drop_aborted_waiting()
        batch = self._schedule()
        self._compute(batch)
        self._finish_aborted()
        self._poll()
        contexts = [count for request, start, count in batch if start < len(request.prompt)]
        self.stats.append(
            iteration_stats(
                self.iterations,
                len(self._active),
                len(self._waiting),
                self._completed,
                self.args.max_batch_size,
                self.blocks,
                contexts,
                len(batch),
            )
        )

    def _compute(self, batch: list[Part]) -> None:
        running = batch
        if batch and self.connectors is not None:
            running = [part for part in batch if part[0].request_id not in self.connectors.loading]
            self.connectors.start(self.connectors.describe(running), self.stream)
        launched = None
        if running and self.passes_to_fail:  # it raises: no wait_for_save, everybody gets an error
            self.passes_to_fail -= 1
            for request in list(self._active):
                self._finish(request, [], "cancelled")
        elif running:
            launched = (running, self._forward(running), self.stream.record_event())
            if self.connectors is not None:
                self.connectors.after_forward(self.stream)
            for request, start, count in running:
                request.kv_tokens = request.context_current_position = start + count
                if request.kv_tokens >= len(request.prompt):
                    request.state = State.GENERATION_IN_PROGRESS
        if self.args.disable_overlap_scheduler:
            ready = launched
        else:
            ready, self._previous = self._previous, launched
        if ready is not None:
            parts, sampled, computed = ready
            computed.synchronize()
            self.stream.raise_error()
            self._hand_out(parts, sampled)
        if self._previous and all(
            r.state is State.GENERATION_COMPLETE for r, *_ in self._previous[0]
        ):
            self._previous = None
        if not batch and ready is None:  # only connectors are busy: let them
            with self._lock:
                self._lock.wait(IDLE_WAIT_S)

    def _schedule(self) -> list[Part]:
        """Generation first, then contexts, within max_num_tokens; new ones while pages last."""
        batch = [
            (request, request.kv_tokens, 1)
            for request in self._active
            if request.state is State.GENERATION_IN_PROGRESS and not self._will_complete(request)
        ]
        budget = self.args.max_num_tokens - len(batch)
        for request in self._active:
            if request.state is State.CONTEXT_INIT:
                budget = self._schedule_context(request, budget, batch)
        while self._waiting and len(self._active) < self.args.max_batch_size and budget > 0:
            request = self._waiting[0]
            if not self._has_room(request):
                break
            self._waiting.popleft()
            self._active.append(request)
            self._prepare_v2(request, budget) if self.is_v2 else self._prepare(request)
            if request.state is State.GENERATION_IN_PROGRESS:
                batch.append((request, request.kv_tokens, 1))
                continue
            budget = self._schedule_context(request, budget, batch)
        for request, start, count in batch:  # a page for what generation adds
            missing = -(-(start + count) // self.shape.tokens_per_block) - len(request.block_ids)
            request.block_ids += self.blocks.allocate(max(0, missing))
        return batch

    def _will_complete(self, request: LlmRequest) -> bool:
        """Newer versions do not compute a token too many when max_tokens says that it would be."""
        sampled = request.kv_tokens - request.asked_tokens + 1
        return HAS_NEW_API and sampled >= self._limit_of(request)

    def _limit_of(self, request: LlmRequest) -> int:
        return 1 if request.kind == "context_only" else request.max_tokens

    def _schedule_context(self, request: LlmRequest, budget: int, batch: list[Part]) -> int:
        start = request.context_current_position
        left = len(request.prompt) - start
        if request.state is State.DISAGG_GENERATION_TRANS_IN_PROGRESS:
            batch.append((request, start, left))  # removed again once the connectors know
            return budget
        if left > budget:
            if not self.args.enable_chunked_prefill:
                return budget
            per_block = self.shape.tokens_per_block
            left = (start + budget) // per_block * per_block - start
        if left > 0:
            batch.append((request, start, left))
        return budget - max(0, left)

    def _has_room(self, request: LlmRequest) -> bool:
        """Pages for all of it, beside what running requests may still take."""
        per_block = self.shape.tokens_per_block

        def need(each: LlmRequest) -> int:
            # One token more than asked for: the overlap scheduler computes it.
            return -(-(each.asked_tokens + each.max_tokens + 1) // per_block)

        reserved = sum(max(0, need(each) - len(each.block_ids)) for each in self._active)
        return reserved + need(request) <= self.blocks.free_blocks

    def _prepare(self, request: LlmRequest) -> None:
        per_block, cache = self.shape.tokens_per_block, self.args.kv_cache_config
        found: list[int] = []
        partial = (-1, 0)
        if cache.enable_block_reuse and request.kind != "generation_only":
            found = self.blocks.match(request.prompt, request.cache_salt)
            if cache.enable_partial_reuse:
                partial = self.blocks.partial_match(request.prompt, request.cache_salt, len(found))
        request.local_tokens = len(found) * per_block + partial[1]
        if self.connectors is not None:
            request.matched_tokens = self.connectors.match(request, request.local_tokens)
        blocks = -(-len(request.prompt) // per_block)
        request.block_ids = found + self.blocks.allocate(blocks - len(found))
        request.is_allocated = True
        if partial[1]:
            source, target = partial[0], request.block_ids[len(found)]
            self.stream.run(lambda: self._copy_page(source, target))
        if self.connectors is not None:
            self.connectors.allocated(request)
        request.context_current_position = request.local_tokens + request.matched_tokens
        if request.kind == "generation_only":
            self._take_state(request)

    def _prepare_v2(self, request: LlmRequest, budget: int) -> None:
        """Allocate the first chunk, ask, allocate what an accepted load needs, report."""
        per_block, cache = self.shape.tokens_per_block, self.args.kv_cache_config
        found: list[int] = []
        if cache.enable_block_reuse and request.kind != "generation_only":
            found = self.blocks.match(request.prompt, request.cache_salt)
        local = request.local_tokens = len(found) * per_block
        request.block_ids, request.is_allocated = list(found), True
        request.context_current_position = local
        self._allocate_to(request, local + self._chunk(request, budget))
        # A request whose asynchronous load is over is not asked again, even if it has no pages.
        if self.connectors is not None and not request.is_loaded:
            offered, is_async = self.connectors.query(request, local)
            taken = offered
            if self.loads_max_tokens is not None:
                taken = min(offered, self.loads_max_tokens // per_block * per_block)
            request.matched_tokens = taken
            request.context_current_position = local + taken
            self._allocate_to(request, local + taken + self._chunk(request, budget))
            self.connectors.commit(request, taken, is_async)
            self.connectors.allocated(request)
        if request.kind == "generation_only":
            self._allocate_to(request, len(request.prompt))
            self._take_state(request)

    def _chunk(self, request: LlmRequest, budget: int) -> int:
        left = request.context_remaining_length
        if left <= budget or not self.args.enable_chunked_prefill:
            return left
        start, per_block = request.context_current_position, self.shape.tokens_per_block
        return (start + budget) // per_block * per_block - start

    def _allocate_to(self, request: LlmRequest, tokens: int) -> None:
        missing = -(-tokens // self.shape.tokens_per_block) - len(request.block_ids)
        request.block_ids += self.blocks.allocate(max(0, missing))

    def take_pages_of(self, request: LlmRequest) -> None:
        """Let the request wait and begin again, as V2 does when pages are short. Called between
        steps, without the overlap scheduler."""
        assert self.is_v2 and self.args.disable_overlap_scheduler
        if request not in self._active or request.state is State.GENERATION_COMPLETE:
            return
        if self.connectors is not None and request.request_id in self.connectors.loading:
            return  # V2 leaves it alone
        self._active.remove(request)
        self.blocks.release(request.block_ids)
        request.begin_again()
        if self.connectors is not None:
            self.connectors.reset(request)
        self._waiting.appendleft(request)

    def _copy_page(self, source: int, target: int) -> None:
        for model in self.ranks:
            model.kv[target] = model.kv[source]

    def _take_state(self, request: LlmRequest) -> None:
        """KV that came from a context_only request of another executor."""
        pages, first_token = pickle.loads(request.opaque_state)
        for model, raw in zip(self.ranks, pages, strict=True):
            for block_id, page in zip(request.block_ids, raw, strict=True):
                self.stream.run(lambda model=model, b=block_id, p=page: model.kv[b].copy_(p))  # type: ignore[misc]
        request.tokens.append(first_token)
        request.device_tokens.append(first_token)
        request.kv_tokens = len(request.prompt)
        request.state = State.GENERATION_IN_PROGRESS

    def _state_of(self, request: LlmRequest) -> bytes:
        blocks = request.block_ids[: -(-len(request.prompt) // self.shape.tokens_per_block)]
        return pickle.dumps(
            ([[m.kv[b].clone() for b in blocks] for m in self.ranks], request.tokens[-1])
        )

    def _forward(self, batch: list[Part]) -> dict[int, int]:
        """Enqueues it; the sampled tokens are in the result once the stream got there."""
        sampled: dict[int, int] = {}
        parts = [(request, list(request.block_ids), s, n) for request, s, n in batch]
        for layer in range(self.shape.layers):
            if self.connectors is not None:
                self.connectors.before_layer(layer, self.stream)
            if layer == self.shape.layers - 1:
                self.stream.run(lambda: self._run_model(parts, sampled))
            if self.connectors is not None:
                self.connectors.after_layer(layer, self.stream)
        return sampled

    def _run_model(
        self, parts: Sequence[tuple[LlmRequest, list[int], int, int]], sampled: dict[int, int]
    ) -> None:
        for request, blocks, start, count in parts:
            token_ids = request.device_tokens[start : start + count]
            if len(token_ids) < count:
                continue  # it ended, and the host did not know yet
            sums = [model.state_sum(blocks, start) for model in self.ranks]
            state = whole_sum(self.shape, sums)
            states = advance(self.shape, state, start, token_ids)
            for model in self.ranks:
                model.write(blocks, start, states)
            if start + count >= len(request.prompt):
                token = next_token(self.shape, next_state(self.shape, state, start, states))
                sampled[request.request_id] = token
                request.device_tokens.append(token)

    # -- results

    def _hand_out(self, batch: list[Part], sampled: dict[int, int]) -> None:
        for request, start, count in batch:
            if request.state is State.GENERATION_COMPLETE or request.is_aborted:
                continue
            if start < len(request.prompt):
                known = min(start + count, len(request.prompt))
                if self.is_v2:
                    salt, tokens = request.cache_salt, request.prompt[:known]
                    self.blocks.rebase(request.block_ids, tokens, salt)
                self.blocks.remember(request.block_ids, request.prompt[:known], request.cache_salt)
            if request.request_id not in sampled:
                continue
            token = sampled[request.request_id]
            request.tokens.append(token)
            reason = None
            if token == request.end_id:
                reason = "stop"
            elif request.generated >= self._limit_of(request):
                reason = "length"
            if request.kind == "context_only":
                request.opaque_state = self._state_of(request)
            if reason is None:
                request.on_output([token], None)
            else:
                self._finish(request, [token], reason)

    def _finish(self, request: LlmRequest, new_tokens: list[int], reason: str) -> None:
        request.state, request.finish_reason = State.GENERATION_COMPLETE, reason
        self._completed += 1
        if request in self._active:
            self._active.remove(request)
        request.on_output(new_tokens, reason)  # before the connector is asked: it is sent already
        if request.is_allocated and self.is_v2 and reason == "cancelled":
            self.blocks.release(request.block_ids)
            # The connector hears of it when its pages are gone, or never.
            if self.connectors is not None and not self.args.disable_overlap_scheduler:
                assert not self.connectors.finished(request, are_freed=True), "a free page is kept"
        elif request.is_allocated:
            computed = len(request.tokens) if self.stores_uncomputed else request.kv_tokens
            known = request.tokens[: min(computed, len(request.tokens) - 1)]
            self.blocks.remember(request.block_ids, known, request.cache_salt)
            is_told = self.connectors and (reason != "cancelled" or self.aborts_are_told)
            if not is_told or not self.connectors.finished(request):
                self.blocks.release(request.block_ids)

    def _drop_aborted_waiting(self) -> None:
        for request in [each for each in self._waiting if each.is_aborted]:
            self._waiting.remove(request)
            self._finish(request, [], "cancelled")

    def _finish_aborted(self) -> None:
        for request in list(self._active):
            # An older executor cancels a request that is being loaded too, and tells the connector.
            waits = HAS_NEW_API or not self.aborts_are_told
            is_loading = request.state is State.DISAGG_GENERATION_TRANS_IN_PROGRESS
            if request.is_aborted and not (is_loading and waits):
                self._finish(request, [], "cancelled")

    def _poll(self) -> None:
        if self.connectors is None:
            return
        saved, loaded = self.connectors.poll()
        for request in saved:
            self.blocks.release(request.block_ids)
            if not HAS_NEW_API:
                break  # an older executor ends one save an iteration and forgets the others
        for request in loaded:
            request.is_loaded = True
            request.state = State.CONTEXT_INIT
