"""Prefill workers as processes of a benchmark, without a server: the real workers, store, inboxes.

`PrefillSite` has a directory, storage nodes, and prefill workers of a random Llama. Triton costs
the same for one worker and for a group, so it is left out here (bench/overhead measures it). A
worker process receives requests through a pipe. The first token goes to an inbox, like that of a
frontend.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from backends.engine.sampling_params import SamplingParams
from backends.triton.worker_kinds import make_worker, read_worker_configs
from backends.workers.protocol import FirstToken, PrefillReply, PrefillRequest, open_inbox
from bench.harness.processes import BenchStore
from bench.harness.random_checkpoint import LlamaShape, make_llama

BLOCK_TOKENS = 256
READY_S_MAX = 120.0
ANSWER_S_MAX = 300.0
CLOSE_S = 10.0


def do_nothing() -> None: ...


class PrefillFailed(ValueError):
    """A worker's error instead of a token."""


class PipeClient:
    """The sender of a request, in the worker's process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def prefilled(self, token_id: int, reply: PrefillReply) -> None:
        self._pipe.send((reply, ""))

    def fail(self, error: Exception) -> None:
        self._pipe.send((None, str(error) or repr(error)))


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
            client = PipeClient(pipe)
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

    def wait_reply(self) -> PrefillReply:
        """The reply to the next request that ends; PrefillFailed if that request failed."""
        reply, error = self._take()
        if error:
            raise PrefillFailed(f"{self.name}: {error}")
        return reply

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


class PrefillSite:
    """Storage nodes by id with the bytes of their segments, and workers with these parameters."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        model: LlamaShape,
        seed: int,
        nodes: Mapping[str, int],
        parameters: Mapping[str, str],
    ) -> None:
        self._stack, self._model = stack, model
        self._rng = np.random.default_rng(seed)
        self._store = BenchStore(stack)
        for node_id, segment_bytes in nodes.items():
            self._store.node(node_id, segment_bytes)
        checkpoint = self._store.folder / "checkpoint"
        checkpoint.mkdir()
        make_llama(checkpoint, model, seed)
        own = {"checkpoint": str(checkpoint), "threads": "1", "block_tokens": str(BLOCK_TOKENS)}
        self._parameters = own | dict(parameters)
        os.environ["MOONCAKE_SOCKETS"] = str(self._store.folder)
        self.tokens = FirstTokens(stack, self._store.folder)

    def start(
        self, name: str, prepare: Callable[[], None] = do_nothing, **parameters: str
    ) -> PrefillProcess:
        """Start a worker without waiting for it; `prepare` as in PrefillProcess."""
        store, every = self._store, self._parameters | parameters
        return PrefillProcess(self._stack, name, every, store.address, store.folder, prepare)

    def fresh(self, tokens: int) -> np.ndarray:
        """A prompt of random tokens."""
        return self._rng.integers(3, self._model.vocabulary_tokens, tokens, dtype=np.int32)
