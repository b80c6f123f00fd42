"""The process that runs vLLM's AsyncLLM for a worker: `python -m backends.engine.vllm.process`.

It has the interpreter of vLLM, and vLLM starts its own processes from it. It ends when its standard
input is closed, that is with its worker. vLLM's processes end with it.

Not here: the worker's side (engine.py), KV (connector.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from backends.engine.connected.channel import MESSAGES_MAX
from backends.engine.vllm.messages import (
    OWN,
    Abort,
    Begin,
    FromProcess,
    FromWorker,
    Generate,
    Output,
    Outputs,
    Setup,
    Started,
    StepNumbers,
    VllmFailed,
)
from backends.engine.vllm.scheduler import NAME
from backends.token_logprobs import TokenLogprobs
from mooncake_store.block_keys import unpacked_tokens
from mooncake_store.wire.mailbox import Inbox, Outbox

log = logging.getLogger(__name__)
WATCH_S = 0.2
GOODBYE_S_MAX = 8.0  # for vLLM's own shutdown
UNFOLLOWED = "vllm: the grammar cannot be compiled, or the model cannot follow it"


class StepStats:
    """A stat logger of vLLM, which it calls after each step."""

    def __init__(self, send: Callable[[FromProcess], None]) -> None:
        self._send = send
        self._last_s = 0.0  # of the step before, if there was work after it
        self._cached = self._prompts = self._preempted = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        now_s = time.perf_counter()
        if scheduler_stats is None:
            return
        running = scheduler_stats.num_running_reqs
        found = scheduler_stats.prefix_cache_stats
        if found is not None:
            self._cached += found.hits
            self._prompts += found.queries
        if iteration_stats is not None:
            self._preempted += iteration_stats.num_preempted_reqs
        self._send(
            StepNumbers(
                now_s - self._last_s if self._last_s else 0.0,
                running,
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                scheduler_stats.kv_cache_usage,
                self._cached,
                self._prompts,
                self._preempted,
            )
        )
        self._last_s = now_s if running else 0.0

    def log_engine_initialized(self) -> None:
        """Nothing: vLLM logs it."""

    def log(self) -> None:
        """Nothing: the worker has metrics."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """Nothing: it never sleeps."""


class EngineProcess:
    def __init__(self, setup: Setup, loop: asyncio.AbstractEventLoop) -> None:
        self._setup = setup
        self._loop = loop
        self._llm: Any = None
        self._news: list[Output] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_over = asyncio.Event()
        self._worker: Outbox[FromProcess] = Outbox(
            msgspec.msgpack.Encoder().encode, messages_max=MESSAGES_MAX
        )
        self._inbox: Inbox[FromWorker] = Inbox(
            setup.address + OWN,
            msgspec.msgpack.Decoder(FromWorker).decode,
            self._take,
            messages_max=MESSAGES_MAX,
            thread_name="from-worker",
        )

    def send(self, message: FromProcess) -> None:
        if not self._worker.send(self._setup.address, message):
            log.error("a message is lost: the worker does not take its messages")

    def describe(self) -> None:
        """Answers with DescribedKv, or VllmFailed."""
        try:
            from backends.engine.vllm.arguments import engine_config
            from backends.engine.vllm.description import described

            self.send(described(engine_config(self._setup.arguments)))
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        log.error("vLLM failed", exc_info=error)
        self.send(VllmFailed(f"{type(error).__name__}: {error}"))
        self._loop.call_soon_threadsafe(self.is_over.set)

    # -- the inbox's thread

    def _take(self, messages: list[FromWorker]) -> None:
        self._loop.call_soon_threadsafe(self._handle, messages)

    # -- the loop

    def _handle(self, messages: list[FromWorker]) -> None:
        for message in messages:
            if isinstance(message, Begin):
                self._start(message)
            elif isinstance(message, Generate):
                self._begin(self._generate(message))
            elif isinstance(message, Abort):
                self._begin(self._llm.abort(str(message.number)))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # asyncio itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    def _start(self, begin: Begin) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        from backends.engine.vllm.arguments import engine_config

        os.environ.update(begin.environment)
        try:
            config = engine_config({**self._setup.arguments, **begin.arguments})
            self._llm = AsyncLLM.from_vllm_config(
                config, stat_loggers=[lambda *_: StepStats(self.send)]
            )
        except BaseException as error:
            self.fail(error)
        else:
            self.send(Started())
            self._begin(self._watch())

    async def _watch(self) -> None:
        """vLLM reports the death of its EngineCore to generations only, and there may be none."""
        while not self._llm.errored:
            await asyncio.sleep(WATCH_S)
        self.fail(self._llm.dead_error)

    async def _generate(self, asked: Generate) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        number = asked.number
        try:
            async for found in self._llm.generate(
                _prompt(asked), vllm_params(asked), request_id=str(number)
            ):
                news = found.outputs[0]
                if news.finish_reason == "error" and "structured_outputs" in asked.sampling:
                    self._say(Output(number, [], "error", UNFOLLOWED, is_refused=True))
                elif news.token_ids or news.finish_reason:
                    token_ids, logprobs = list(news.token_ids), token_logprobs(asked, news)
                    reason = news.finish_reason or ""
                    self._say(Output(number, token_ids, reason, logprobs=logprobs))
        except (ValueError, VLLMClientError) as error:  # vLLM checks requests before it takes them
            self._say(Output(number, [], "error", f"vllm: {error}", is_refused=True))
        except EngineDeadError as error:
            self._say(Output(number, [], "error", f"vllm: {error}"))
            self.fail(error)
        except Exception as error:  # Catch all: one generation must not end the others
            log.exception("a generation failed")
            self._say(Output(number, [], "error", f"vllm: {type(error).__name__}: {error}"))

    def _say(self, news: Output) -> None:
        """News of one step go in one message."""
        if not self._news:
            self._loop.call_soon(self._flush)
        self._news.append(news)

    def _flush(self) -> None:
        news, self._news = self._news, []
        self.send(Outputs(news))

    def close(self) -> None:
        self._inbox.close()
        if self._llm is not None:
            self._llm.shutdown()
        self._worker.close()


def _prompt(asked: Generate) -> Any:
    prompt: dict[str, Any] = {"prompt_token_ids": unpacked_tokens(asked.token_ids).tolist()}
    if asked.cache_salt:  # otherwise tenants would share vLLM's own cache
        prompt["cache_salt"] = asked.cache_salt
    return prompt


def vllm_params(asked: Generate) -> Any:
    """vLLM's SamplingParams."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    wanted = dict(asked.sampling)
    further = dict(wanted.pop("extra_args", {}))
    if asked.request_id:
        further["kv_transfer_params"] = {NAME: asked.request_id}
    if guided := wanted.pop("structured_outputs", None):
        wanted["structured_outputs"] = StructuredOutputsParams(**guided)
    return SamplingParams(
        **wanted, output_kind=RequestOutputKind.DELTA, detokenize=False, extra_args=further or None
    )


def token_logprobs(asked: Generate, news: Any) -> list[TokenLogprobs]:
    """Of each new token; [] if the request wants none. Of equal logprobs, the lowest id is best."""
    if "logprobs" not in asked.sampling:
        return []
    top, found = asked.sampling["logprobs"], []
    for token_id, by_id in zip(news.token_ids, news.logprobs, strict=True):
        best = sorted((-each.logprob, other) for other, each in by_id.items())[:top]
        ids, log_probs = tuple(other for _, other in best), tuple(-below for below, _ in best)
        found.append(TokenLogprobs(by_id[token_id].logprob, ids, log_probs))
    return found


def end_with_input(on_end: Callable[[], None]) -> None:
    """Call `on_end` when standard input is closed, and exit if that does not end this process: then
    vLLM's processes end too (connector.py)."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        timer = threading.Timer(GOODBYE_S_MAX, os._exit, (1,))
        timer.daemon = True
        timer.start()
        on_end()

    threading.Thread(target=watch, name="stdin", daemon=True).start()


async def run(setup: Setup) -> None:
    loop = asyncio.get_running_loop()
    process = EngineProcess(setup, loop)
    end_with_input(lambda: loop.call_soon_threadsafe(process.is_over.set))
    await loop.run_in_executor(None, process.describe)
    await process.is_over.wait()
    with contextlib.suppress(Exception):  # the worker kills what is left
        process.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    asyncio.run(run(setup))


if __name__ == "__main__":
    main()
