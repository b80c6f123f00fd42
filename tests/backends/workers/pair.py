"""A prefill and a decode worker in this process, with every thread of theirs and no server.

The real workers, drivers, store, segment and inboxes; the directory is called directly, and speeds
are not measured. Tests wait on events with a deadline. Not here: workers whose threads are stepped
by hand (tests/backends/stepped_site.py).
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.engine.sampling_params import SamplingParams
from backends.errors import ServingError
from backends.triton.worker_kinds import make_worker, read_worker_configs
from backends.workers import lasting_parts, machine_profile
from backends.workers.decode_worker import DecodeWorker
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.protocol import DecodeReply, DecodeRequest, PrefillReply, PrefillRequest
from tests.mooncake_store.client.world import MappedNode
from tests.mooncake_store.in_process import InProcessDirectory

WAIT_S = 90.0
NODE = "s0"
# What only the other role has.
OTHERS_OWN = {"prefill": {"slots"}, "decode": {"chunk_tokens", "layerwise"}}


def prompt(number: int, tokens: int) -> list[int]:
    """Tokens of the demo's vocabulary."""
    return [20 + (number * 7919 + index * index * (number + 1)) % 2000 for index in range(tokens)]


class PairDirectory(InProcessDirectory):
    def close(self) -> None: ...


class Asked:
    """One request's client at both workers; carries the hand-over from one to the other."""

    def __init__(self, pair: Pair, request_id: str, prompt: list[int], **request: Any) -> None:
        self.pair = pair
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = SamplingParams(**{"max_tokens": 8, **request})
        self.fetch_blocks = 0  # that may come from other nodes
        self.near_blocks = 0  # that the conductor knew in the own one
        self.priority = 0
        self.frontend = pair.decode.process.inbox.address + "-frontend"
        self.messages_per_s_max = 0.0  # of its frontend; 0: no message comes before the reply
        self.output_ids: list[int] = []
        self.prefill_reply: PrefillReply | None = None
        self.decode_reply: DecodeReply | None = None
        self.error: Exception | None = None
        self.before_decode: Callable[[], None] = lambda: None
        self._is_over = threading.Event()

    def prefilled(self, token_id: int, reply: PrefillReply) -> None:
        self.output_ids.append(token_id)
        self.prefill_reply = reply
        if self.sampling.max_tokens == 1:
            self._is_over.set()
            return
        self.before_decode()
        ids = np.array([*self.prompt, token_id], np.int32)
        request = DecodeRequest(
            request_id=self.request_id,
            prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            cache_salt="",
            blocks=reply.blocks,
            stream_interval=1 if self.messages_per_s_max else 0,
            reply_inbox=self.frontend if self.messages_per_s_max else "",
            messages_per_s_max=self.messages_per_s_max,
            native=reply.native,
            priority=self.priority,
        )
        try:
            self.pair.decode.submit(request, ids, self)
        except ServingError as error:
            self.fail(error)

    def decoded(self, token_ids: list[int], reply: DecodeReply) -> None:
        self.output_ids += token_ids
        self.decode_reply = reply
        self._is_over.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._is_over.set()

    def wait_over(self) -> None:
        assert self._is_over.wait(WAIT_S), f"{self.request_id} was never answered"

    def wait(self) -> list[int]:
        self.wait_over()
        assert self.error is None, self.error
        return self.output_ids

    def wait_failed(self) -> Exception:
        self.wait_over()
        assert self.error is not None, f"{self.request_id} went well"
        return self.error


class Pair:
    """Workers `prefill` and `decode` of one node; `parameters` as config.pbtxt has them."""

    prefill: PrefillWorker
    decode: DecodeWorker

    def __init__(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int = 1, **parameters: str
    ) -> None:
        self.directory = PairDirectory()
        path = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
        self._node = MappedNode(path, NODE)
        self.directory.up(self._node.info)
        self._numbers = itertools.count()
        sockets = tmp_path / "s"
        sockets.mkdir()
        monkeypatch.setenv("MOONCAKE_SOCKETS", str(sockets))
        monkeypatch.setenv("MOONCAKE_STATE", str(tmp_path))
        monkeypatch.setenv("MOONCAKE_DIRECTORY", "in this process")
        monkeypatch.setattr(lasting_parts, "DirectoryClient", lambda address: self.directory)
        unmeasured = machine_profile.MachineProfile((), (), 0.0)
        monkeypatch.setattr(machine_profile, "load_or_measure", lambda *_: unmeasured)
        raw = {"transport": "mapped", "kv_pages": "64", "block_tokens": "64", **parameters}
        self._repository, self._raw, self._stages = str(tmp_path / "repository"), raw, stages
        self._workers: list[Any] = []
        self.stages: list[Any] = []  # of prefill, without the first
        self._make()

    def _make(self) -> None:
        for role in ("prefill", "decode"):
            of_group = self.of_stage(0) if role == "prefill" else {}
            raw = self._raw | of_group
            raw = {name: raw[name] for name in raw if name not in OTHERS_OWN[role]}
            configs = read_worker_configs(role, f"{role}_0", raw, 1)
            worker = make_worker(role, f"{role}_0", self._repository, *configs)
            setattr(self, role, worker)
            self._workers.append(worker)
        for stage in range(1, self._stages):
            self.stages.append(self.start_stage(stage))

    def of_stage(self, stage: int) -> dict[str, str]:
        """What the config.pbtxt of a stage has beside the rest."""
        if self._stages == 1:
            return {}
        values = {"group": "g0", "stage": str(stage), "stages": str(self._stages)}
        return {f"pipeline_{name}": value for name, value in values.items()}

    def start_stage(self, stage: int, name: str = "", **parameters: str) -> Any:
        name = name or f"prefill_stage_{stage}"
        raw = self._raw | self.of_stage(stage) | parameters
        configs = read_worker_configs("prefill", name, raw, 1)
        return make_worker("prefill", name, self._repository, *configs)

    def wait_until_whole(self) -> None:
        """All stages of the group are ready."""
        with self.prefill.lock:
            available = lambda: self.prefill.driver.is_available  # noqa: E731
            assert self.prefill.lock.wait_for(available, WAIT_S), "the group is not whole"

    def ask(self, prompt: list[int], **request: Any) -> Asked:
        asked = Asked(self, f"r{next(self._numbers)}", prompt, **request)
        self.submit(asked)
        return asked

    def submit(self, asked: Asked) -> None:
        request = PrefillRequest(
            request_id=asked.request_id,
            prompt_tokens=len(asked.prompt),
            sampling=asked.sampling,
            cache_salt="",
            fetch_blocks=asked.fetch_blocks,
            decode_inbox=self.decode.process.inbox.address if asked.sampling.max_tokens > 1 else "",
            reply_inbox="",
            reserve_tokens=len(asked.prompt) + asked.sampling.max_tokens,
            near_blocks=asked.near_blocks,
        )
        self.prefill.submit(request, np.array(asked.prompt, np.int32), asked)

    def wait_for_decode(self) -> None:
        """Some request has come to the decode worker."""
        with self.decode.lock:
            assert self.decode.lock.wait_for(lambda: self.decode.jobs, WAIT_S)

    def wait_until_idle(self) -> None:
        """Nobody holds a page, a job or a lease of requests that are over."""
        for worker in self._workers:
            with worker.lock:
                assert worker.lock.wait_for(
                    lambda w=worker: not w.open_jobs and not w._pages.used_pages, WAIT_S
                ), f"{worker.process.worker_id} is not idle"
            worker.check()

    def restart_node(self) -> None:
        """The storage node dies, and what it held with it."""
        self._node.kill()
        self.directory.deregister_node(NODE, self._node.info.incarnation)
        self._node = MappedNode(self._node.segment.path, NODE)
        self.directory.up(self._node.info)

    def close(self) -> None:
        for worker in [*self._workers, *self.stages]:
            worker.close(WAIT_S)
        self._node.close()


def pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int = 1, **parameters: str
) -> Iterator[Pair]:
    pair = Pair(tmp_path, monkeypatch, stages, **parameters)
    try:
        yield pair
    finally:
        pair.close()
