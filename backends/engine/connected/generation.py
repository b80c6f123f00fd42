"""Generations of an engine that batches by itself: how a worker orders one and is notified of it.

An engine's processes may die, or fail each request, without a report. `EngineHealth` counts
failures that no request has caused. After several in a row the engine is lost: the worker leaves
the cluster and its process exits, and the launcher starts both again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backends.engine.connected.channel import ConnectorHost
from backends.engine.interface import ServingEngine
from backends.engine.sampling_params import SamplingParams
from backends.token_logprobs import TokenLogprobs

log = logging.getLogger(__name__)
FAILURES_MAX = 3  # in a row; a single failure may be an accident


@dataclass(frozen=True, slots=True)
class Order:
    """One generation to order."""

    token_ids: Sequence[int]
    sampling: Any  # an object of the engine
    cache_salt: str = ""
    is_streaming: bool = True
    native_params: Any = None  # of the engine's own hand-over; None: there is none
    request_id: str = ""  # of the worker; "": nothing was staged


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended. finish_reason: stop | length | cancelled | timeout."""

    finish_reason: str = ""
    error: Exception | None = None
    native: bytes = b""  # after prefill with the engine's own hand-over: what decode needs


class Sink(Protocol):
    """Notified of one generation in the engine's thread. The methods must return soon."""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """`logprobs`: of each token, if the request wants logprobs."""

    def ended(self, outcome: Outcome) -> None:
        """Called exactly once, after the last tokens."""


class EngineRun(Protocol):
    """A generation that was ordered."""

    def abort(self) -> None:
        """Any thread may call this at any time."""


class EngineThread(Protocol):
    """The thread in which the engine reports tokens."""

    is_healthy: bool  # False: the engine says that its processes have failed

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread. Any thread may call this."""

    def soon(self, action: Callable[[], None]) -> None:
        """Run `action` after the reports that have arrived. Only for the thread itself."""


class ConnectedEngine(ServingEngine, Protocol):
    """An engine that batches by itself, in processes and pages of its own."""

    is_connected: bool  # False: it has no connector, so it loads and saves no blocks
    is_native: bool  # True: it hands KV over by itself
    handover_tokens: int  # KV is handed over in multiples of so many tokens: a page, or 1
    max_seq_len: int  # largest number of prompt and output tokens that the engine itself accepts
    slots: int  # requests in one step
    hardware: str  # name of the hardware in the machine profile
    stats: Any  # numbers of its newest step: `raw`, empty before the first, and `series()`

    @property
    def host(self) -> ConnectorHost: ...

    @property
    def llm(self) -> EngineThread: ...

    def sampling(
        self, params: SamplingParams, position: int, tokens: int, prompt_tokens: int = 0
    ) -> Any:
        """The engine's own parameters. Raises InvalidRequest for what it does not support."""

    def native_params(self, request_id: str, state: bytes) -> Any:
        """Parameters of the engine's own hand-over. `state`: what prefill's Outcome had."""

    def generate(self, order: Order, sink: Sink) -> EngineRun: ...


class EngineHealth:
    def __init__(self, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called once, with the reason, in the thread that noticed the loss."""
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._failures = 0
        self.is_lost = False

    def went_well(self) -> None:
        self._failures = 0

    def failed(self, reason: str) -> None:
        """A generation failed, and its request is not the cause."""
        with self._lock:
            self._failures += 1
            is_gone = self._failures >= FAILURES_MAX
        if is_gone:
            self.lose(reason)

    def lose(self, reason: str) -> None:
        """The engine cannot work any more."""
        with self._lock:
            if self.is_lost:
                return
            self.is_lost = True
        log.critical("the engine is lost: %s", reason)
        self._on_lost(reason)
