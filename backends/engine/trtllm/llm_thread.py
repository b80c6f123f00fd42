"""tensorrt_llm.LLM in a thread of its own, with the event loop that its results need.

A result belongs to the loop in which it was requested, so only this thread uses the LLM.

With `handoff: native` TensorRT-LLM's cache transceiver sends KV from GPU to GPU. A context-only
request ends with `DisaggregatedParams`, a description of where its KV is. The workers pass it as
bytes to the generation-only request on the decode engine.

Not here: the arguments of the LLM (engine.py), the order of requests (the workers).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from backends.engine.connected.generation import Order, Outcome, Sink
from backends.engine.trtllm.package import accepted, only_accepted
from backends.engine.trtllm.stats import IterationStats
from backends.errors import InvalidRequest, WorkerUnavailable

log = logging.getLogger(__name__)
STATS_TIMEOUT_S = 0.5  # one call waits so long for the next step
STATS_PERIOD_S = 0.2
SHUTDOWN_S_MAX = 20.0


class LlmRun:
    """An ordered generation. Its `abort` reaches the engine with the first token, not before.

    Older releases (1.2.x among them) reuse also the pages of a cancelled prompt that were not
    computed (upstream's PR 12673). And pages that are being loaded must not be freed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._has_tokens = False
        self.result: Any = None
        self.is_aborted = False

    def abort(self) -> None:
        """From any thread; the other methods run in the LLM's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and everything with it
            self._loop.call_soon_threadsafe(self._abort_here)

    def _abort_here(self) -> None:
        if not self.is_aborted:
            self.is_aborted = True
            self._abort_if_computed()

    def got_tokens(self) -> None:
        if not self._has_tokens:
            self._has_tokens = True
            self._abort_if_computed()

    def _abort_if_computed(self) -> None:
        if self.is_aborted and self._has_tokens and not self.result.finished:
            self.result.abort()


class LlmThread:
    def __init__(
        self, build: Callable[[], Any], on_stats: Callable[[IterationStats], None]
    ) -> None:
        """Raises what `build` raises. `build` takes minutes and runs in a thread of its own."""
        self._build = build
        self._on_stats = on_stats
        self._llm: Any = None
        self.stats = IterationStats({})
        self.is_healthy = True  # False: tensorrt_llm has reported that its processes failed
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def generate(self, order: Order, sink: Sink) -> LlmRun:
        """Never blocks. The sink gets the tokens and the end."""
        running = LlmRun(self._loop)
        try:
            self._loop.call_soon_threadsafe(self._begin, order, sink, running)
        except RuntimeError as error:
            raise WorkerUnavailable("the engine has been shut down") from error
        return running

    def soon(self, action: Callable[[], None]) -> None:
        """Run `action` later in this thread. Only this thread may call it."""
        self._loop.call_soon(action)

    def post(self, action: Callable[[], None]) -> None:
        """As `soon`, from any thread. After the end of this thread `action` is dropped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(action)

    def close(self, timeout_s: float) -> None:
        """Wait `timeout_s` for running generations, then end the LLM and this thread."""
        if not self._thread.is_alive():
            return
        try:
            closing = asyncio.run_coroutine_threadsafe(self._close(timeout_s), self._loop)
            closing.result(timeout_s + SHUTDOWN_S_MAX + 5.0)
        except Exception as error:  # Catch all: the remaining objects must be closed too
            log.error("tensorrt_llm did not shut down: %s: %s", type(error).__name__, error)
        self._end_loop()

    # -- in the thread

    async def _start(self) -> None:
        self._llm = await self._loop.run_in_executor(None, self._build)
        self._stats_task = self._loop.create_task(self._watch_stats())

    def _begin(self, order: Order, sink: Sink, running: LlmRun) -> None:
        task = self._loop.create_task(self._run(order, sink, running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, order: Order, sink: Sink, running: LlmRun) -> None:
        try:
            outcome = await self._generate(order, sink, running)
        except asyncio.CancelledError:
            outcome = Outcome("cancelled", WorkerUnavailable("the engine is shutting down"))
        except ValueError as error:  # tensorrt_llm checks requests before it takes them
            outcome = Outcome(error=InvalidRequest(f"tensorrt_llm: {error}"))
        except Exception as error:  # Catch all: one generation must not end the others
            log.exception("a generation failed")
            outcome = Outcome(error=WorkerUnavailable(f"tensorrt_llm: {error}"))
        try:
            sink.ended(outcome)
        except Exception:  # Catch all: as above
            log.exception("the end of a generation was not taken")

    async def _generate(self, order: Order, sink: Sink, running: LlmRun) -> Outcome:
        if running.is_aborted:
            return Outcome("cancelled")
        # Without the salt, tenants would share the engine's pages.
        asked = {"cache_salt": order.cache_salt, "disaggregated_params": order.native_params}
        needed = {name: value for name, value in asked.items() if value}
        generate = self._llm.generate_async
        known = accepted(generate)
        if known is not None and (missing := needed.keys() - known):
            raise ValueError(f"this release's generate_async has no {', '.join(sorted(missing))}")
        result = running.result = generate(
            {"prompt_token_ids": list(order.token_ids)},
            sampling_params=order.sampling,
            streaming=order.is_streaming,
            **needed,
        )
        if order.is_streaming:
            async for _ in result:
                if new := result.outputs[0].token_ids_diff:
                    running.got_tokens()
                    sink.tokens(list(new))
        else:
            await result
            if token_ids := result.outputs[0].token_ids:
                sink.tokens(list(token_ids))
        return Outcome(result.outputs[0].finish_reason or "", native=packed(result))

    async def _watch_stats(self) -> None:
        ask = getattr(self._llm, "get_stats_async", None)
        while True:
            try:
                if ask is not None:
                    async for raw in ask(STATS_TIMEOUT_S):
                        read = json.loads(raw) if isinstance(raw, str) else raw
                        self.stats = IterationStats(read)
                        self._on_stats(self.stats)
            except Exception as error:  # Catch all: metrics must not end the engine
                log.debug("no statistics: %s", error)
            self._look_after()
            await asyncio.sleep(STATS_PERIOD_S)

    def _look_after(self) -> None:
        """Some releases have a check of their processes, for their own server."""
        check = getattr(self._llm, "_check_health", None)
        try:
            if check is not None and check() is False:
                self.is_healthy = False
        except Exception as error:  # Catch all: a private method of TensorRT-LLM may fail
            log.debug("tensorrt_llm cannot check its processes: %s", error)

    async def _close(self, timeout_s: float) -> None:
        self._stats_task.cancel()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._stats_task, *self._tasks, return_exceptions=True)
        shutdown = self._loop.run_in_executor(None, self._llm.shutdown)
        await asyncio.wait_for(shutdown, SHUTDOWN_S_MAX)
        await self._loop.shutdown_default_executor()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()


FIELDS = (
    "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens", "disagg_request_id",
    "ctx_dp_rank", "ctx_info_endpoint",
)  # fmt: skip
CONTEXT_ONLY, GENERATION_ONLY = "context_only", "generation_only"


def for_prefill(cls: Any, request_id: str) -> Any:
    """`cls` is tensorrt_llm.DisaggregatedParams. The Python transceiver needs a unique number for
    each request; other transceivers ignore it."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 2  # it must fit into a signed 64-bit integer
    welcome = only_accepted(cls, {"disagg_request_id": number})
    return cls(request_type=CONTEXT_ONLY, **welcome)


def packed(result: Any) -> bytes:
    """The plain data in the description of a context-only result; b"" for any other result."""
    params = getattr(result.outputs[0], "disaggregated_params", None) or getattr(
        result, "disaggregated_params", None
    )
    if params is None:
        return b""
    values = {name: getattr(params, name, None) for name in FIELDS}
    kinds = (int, str, bytes, list, tuple)
    plain = {name: value for name, value in values.items() if isinstance(value, kinds)}
    return msgspec.msgpack.encode(plain)


def for_decode(cls: Any, state: bytes) -> Any:
    values: dict[str, Any] = msgspec.msgpack.decode(state)
    return cls(request_type=GENERATION_ONLY, **only_accepted(cls, values))
