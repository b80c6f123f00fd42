"""The worker's end of vLLM's process: starts it, orders generations, and gets their news.

All reports run in one thread, in the order in which they came. The process is in a group of its own
with all that vLLM starts, and `close` ends the group. If the worker dies, the process sees the end
of its input.

Not here: the process itself (process.py), the settings (engine.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from backends.engine.connected.channel import MESSAGES_MAX
from backends.engine.connected.generation import Order, Outcome, Sink
from backends.engine.vllm import messages as m
from backends.errors import ConfigError, InvalidRequest, WorkerUnavailable
from mooncake_store.block_keys import packed_tokens
from mooncake_store.wire.mailbox import Inbox, Outbox

log = logging.getLogger(__name__)
PROJECT = Path(__file__).resolve().parents[3]
MODULE = "backends.engine.vllm.process"
POLL_S = 0.2  # the end of the process is noticed at most so late
EXIT_S_MAX = 10.0
TRACKERS_S_MAX = 5.0
REASONS = {"stop": "stop", "length": "length", "abort": "cancelled", "timeout": "timeout"}

T = TypeVar("T")


class VllmRun:
    """An ordered generation."""

    def __init__(self, thread: VllmThread, number: int) -> None:
        self._thread = thread
        self._number = number

    def abort(self) -> None:
        self._thread.abort(self._number)


class VllmThread:
    def __init__(
        self,
        python: Path,
        setup: m.Setup,
        environment: Mapping[str, str],
        on_stats: Callable[[m.StepNumbers], None],
    ) -> None:
        """Starts the process. Raises ConfigError if there is no such program."""
        self._address = setup.address
        self._on_stats = on_stats
        self.stats: m.StepNumbers | None = None
        self._numbers = itertools.count()
        self._sinks: dict[int, Sink] = {}
        self._failure = ""  # the process has failed
        self._described: Future[m.DescribedKv] = Future()
        self._started: Future[None] = Future()
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: Outbox[m.FromWorker] = Outbox(
            msgspec.msgpack.Encoder().encode, messages_max=MESSAGES_MAX
        )
        self._inbox: Inbox[m.FromProcess] = Inbox(
            setup.address,
            msgspec.msgpack.Decoder(m.FromProcess).decode,
            lambda messages: self._actions.put(lambda: self._take(messages)),
            messages_max=MESSAGES_MAX,
            thread_name="from-vllm",
        )
        try:
            self._process = subprocess.Popen(
                [str(python), "-m", MODULE],
                stdin=subprocess.PIPE,
                env=_with_project(environment),
                cwd=PROJECT,
                start_new_session=True,
            )
        except OSError as error:
            self._inbox.close()
            raise ConfigError(f"engine_python {python} cannot be started: {error}") from error
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `described` reports that
            self._process.stdin.write(msgspec.json.encode(setup) + b"\n")
            self._process.stdin.flush()
        self._thread = threading.Thread(target=self._run, name="llm", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        return not self._failure and self._process.poll() is None

    def described(self) -> m.DescribedKv:
        """Waits for vLLM's imports and its reading of the checkpoint. Raises ConfigError."""
        return self._wait(self._described)

    def begin(self, begin: m.Begin) -> None:
        """Waits until vLLM has started. Raises ConfigError."""
        self._send(begin)
        self._wait(self._started)

    def _wait(self, future: Future[T]) -> T:
        while True:
            with contextlib.suppress(futures.TimeoutError):
                return future.result(POLL_S)
            if (code := self._process.poll()) is not None:
                with contextlib.suppress(futures.TimeoutError):  # its last message
                    return future.result(POLL_S)
                raise ConfigError(f"the process of vLLM ended with code {code}; its log says why")

    def generate(self, order: Order, sink: Sink) -> VllmRun:
        """Never blocks. The sink gets the tokens and the end."""
        number = next(self._numbers)
        self.post(lambda: self._begin(number, order, sink))
        return VllmRun(self, number)

    def abort(self, number: int) -> None:
        self.post(lambda: self._abort(number))

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread, after the reports that have arrived."""
        self._actions.put(action)

    soon = post

    def close(self) -> None:
        """End vLLM's processes, then this thread."""
        self._failure = self._failure or "the engine is shutting down"
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S_MAX)
        self._end_group()
        self._inbox.close()
        self._outbox.close()
        self.post(self._fail_all)
        self._actions.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=EXIT_S_MAX)

    def _end_group(self) -> None:
        """Kill what is left. Python's resource tracker is the last of the group: when all others
        have ended, it removes their shared memory."""
        until_s = time.monotonic() + TRACKERS_S_MAX
        while time.monotonic() < until_s and _living(self._process.pid):
            self._process.poll()
            time.sleep(POLL_S / 4)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    # -- in the thread

    def _run(self) -> None:
        while True:
            try:
                action = self._actions.get(timeout=POLL_S)
            except queue.Empty:
                self._look_after()
                continue
            if action is None:
                return
            try:
                action()
            except Exception:  # Catch all: one report must not end the others
                log.exception("a report of vLLM was not taken")

    def _look_after(self) -> None:
        code = self._process.poll()
        if code is not None and not self._failure:
            self._fail(f"the process of vLLM has ended with code {code}")

    def _take(self, messages: Sequence[m.FromProcess]) -> None:
        for message in messages:
            match message:
                case m.Outputs():
                    for news in message.news:
                        self._report(news)
                case m.StepNumbers():
                    self.stats = message
                    self._on_stats(message)
                case m.DescribedKv():
                    self._described.set_result(message)
                case m.Started():
                    self._started.set_result(None)
                case m.VllmFailed():
                    self._fail(message.reason)

    def _report(self, news: m.Output) -> None:
        sink = self._sinks.get(news.number)
        if sink is None:
            return
        if news.token_ids:
            sink.tokens(news.token_ids, news.logprobs)
        if news.finish_reason:
            del self._sinks[news.number]
            sink.ended(_outcome(news))

    def _begin(self, number: int, order: Order, sink: Sink) -> None:
        if self._failure:
            sink.ended(Outcome(error=WorkerUnavailable(self._failure)))
            return
        self._sinks[number] = sink
        self._send(
            m.Generate(
                number,
                order.request_id,
                bytes(packed_tokens(order.token_ids)),
                order.sampling,
                order.cache_salt,
            )
        )

    def _abort(self, number: int) -> None:
        if number in self._sinks:
            self._send(m.Abort(number))

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for future in (self._described, self._started):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(ConfigError(reason))
        self._fail_all()

    def _fail_all(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.ended(Outcome(error=WorkerUnavailable(self._failure)))

    def _send(self, message: m.FromWorker) -> None:
        if not self._outbox.send(self._address + m.OWN, message):
            raise WorkerUnavailable("the process of vLLM does not take its messages")


def _living(group: int) -> bool:
    """True if a process of this group has not ended. One that nobody has waited for yet has."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def _outcome(news: m.Output) -> Outcome:
    if not news.error and news.finish_reason in REASONS:
        return Outcome(REASONS[news.finish_reason])
    error: Any = InvalidRequest if news.is_refused else WorkerUnavailable
    return Outcome(error=error(news.error or f"vllm: ended with {news.finish_reason}"))


def _with_project(environment: Mapping[str, str]) -> dict[str, str]:
    """From a checkout the process finds our packages, also in an interpreter without them. The
    folder of a wheel is not added: it has the numpy of the server."""
    found = {**os.environ, **environment}
    if (PROJECT / "pyproject.toml").exists():
        paths = [str(PROJECT), *filter(None, found.get("PYTHONPATH", "").split(os.pathsep))]
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    found.pop("PYTHONHOME", None)
    return found
