"""Prefill workers as processes of a benchmark, without a server: the real workers, store, inboxes.

Triton costs the same for one worker and for a group, so it is left out here (bench/overhead
measures it). A worker process receives requests through a pipe. The first token goes to an inbox,
like that of a frontend.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from backends.engine.sampling_params import SamplingParams
from backends.triton.worker_kinds import make_worker, read_worker_configs
from backends.workers.protocol import FirstToken, PrefillReply, PrefillRequest, open_inbox

READY_S_MAX = 120.0
ANSWER_S_MAX = 300.0
CLOSE_S = 10.0


def do_nothing() -> None: ...


class PrefillFailed(ValueError):
    """A worker's error instead of a token."""


class PipeClient:
    """The sender of a request, in the worker's process."""

    def __init__(self, pipe: Connection, request_id: str) -> None:
        self._pipe, self._request_id = pipe, request_id

    def prefilled(self, token_id: int, reply: PrefillReply) -> None:
        self._pipe.send((self._request_id, token_id, reply, ""))

    def fail(self, error: Exception) -> None:
        self._pipe.send((self._request_id, -1, None, str(error) or repr(error)))


@dataclass(frozen=True, slots=True)
class Prefilled:
    request_id: str
    token_id: int
    reply: PrefillReply


def run_worker(
    name: str,
    parameters: Mapping[str, str],
    variables: Mapping[str, str],
    pipe: Connection,
    prepare: Callable[[], None],
) -> None:
    os.environ.update(variables)
    prepare()
    worker: Any = make_worker(
        "prefill", name, "", *read_worker_configs("prefill", name, parameters, 1)
    )
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            asked = pipe.recv()
            if asked is None:
                pipe.send(worker.process.occupation.page_seconds(time.monotonic()))
                continue
            request, token_ids = asked
            client = PipeClient(pipe, request.request_id)
            try:
                worker.submit(request, token_ids, client)
            except Exception as error:  # Catch all: the error is sent to the benchmark
                client.fail(error)


class PrefillProcess:
    """One worker process; ends with the stack."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        name: str,
        parameters: Mapping[str, str],
        directory: str,
        folder: Path,
        prepare: Callable[[], None] = do_nothing,
    ) -> None:
        """`prepare` runs in the process before its worker is made."""
        variables = {
            "MOONCAKE_DIRECTORY": directory,
            "MOONCAKE_SOCKETS": str(folder),
            "MOONCAKE_STATE": str(folder),
        }
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=run_worker,
            args=(name, dict(parameters), variables, theirs, prepare),
            daemon=True,
        )
        self.process.start()
        stack.callback(self.process.join, CLOSE_S)
        stack.callback(self.process.kill)
        self.name = name

    def wait_ready(self) -> None:
        self._take()

    def ask(self, request: PrefillRequest, token_ids: np.ndarray) -> None:
        self._pipe.send((request, token_ids))

    def wait_answer(self) -> int:
        """Cached tokens of a successful request; PrefillFailed otherwise."""
        return self.wait_reply().reply.cached_tokens

    def wait_reply(self) -> Prefilled:
        request_id, token_id, reply, error = self._take()
        if error:
            raise PrefillFailed(f"{self.name}: {error}")
        return Prefilled(request_id, token_id, reply)

    def page_seconds(self) -> float:
        """Taken pages times the seconds that they stayed taken, until now; call it without open
        requests."""
        self._pipe.send(None)
        return float(self._take())

    def _take(self) -> Any:
        if not self._pipe.poll(READY_S_MAX if self.process.is_alive() else 0):
            raise PrefillFailed(f"{self.name} does not answer")
        try:
            return self._pipe.recv()
        except EOFError:
            raise PrefillFailed(f"{self.name} has died") from None


class FirstTokens:
    """Arrival times of the first token of each request, as at a frontend."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self._came_s: dict[str, float] = {}
        self._has_come = threading.Condition()
        self._numbers = itertools.count()
        self.inbox = open_inbox(f"ipc://{folder}/frontend", self._on_messages)
        stack.callback(self.inbox.close)

    def _on_messages(self, messages: list[Any]) -> None:
        now_s = time.perf_counter()
        with self._has_come:
            for message in messages:
                if isinstance(message, FirstToken):
                    self._came_s[message.request_id] = now_s
            self._has_come.notify_all()

    def wait_s(self, request_id: str) -> float:
        with self._has_come:
            if not self._has_come.wait_for(lambda: request_id in self._came_s, ANSWER_S_MAX):
                raise PrefillFailed(f"no first token of {request_id}")
            return self._came_s.pop(request_id)

    def request(
        self, token_ids: np.ndarray, fetch_blocks: int = 0, fetch_nodes: Sequence[str] = ()
    ) -> PrefillRequest:
        """A request whose token comes to this inbox. Up to `fetch_blocks` blocks may be fetched
        from `fetch_nodes`."""
        return PrefillRequest(
            request_id=f"bench-{next(self._numbers)}",
            prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=2),
            cache_salt="",
            fetch_blocks=fetch_blocks,
            fetch_nodes=list(fetch_nodes),
            decode_inbox="",
            reply_inbox=self.inbox.address,
            reserve_tokens=0,
        )
