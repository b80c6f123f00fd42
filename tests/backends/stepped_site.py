"""A prefill and a decode worker with every thread of theirs stepped by hand, from one seed.

The real workers, batching, pages, loaders and writers; the engine, the store and the frontend are
small. What other threads do in the middle of an engine step happens at its layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.config_pbtxt import DecodeConfig, PrefillConfig
from backends.engine.batching.layer_passes import RingLayout
from backends.engine.batching.pages import PagePool
from backends.engine.interface import Work
from backends.engine.sampling_params import SamplingParams
from backends.errors import ServingError
from backends.metrics.page import Observations
from backends.token_logprobs import PromptScores
from backends.workers import decode_worker
from backends.workers import worker as worker_module
from backends.workers.decode_worker import DecodeWorker
from backends.workers.kv_writer import KvWriter, object_key
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.protocol import (
    CallLimits,
    DecodeReply,
    DecodeRequest,
    PrefillReply,
    PrefillRequest,
    Stop,
)
from backends.workers.step_driver import WHOLE_BYTES_MAX, StepDecode, StepPrefill
from backends.workers.step_times import StepTimes, StepWatch
from backends.workers.worker_process import LeaseKeeper
from mooncake_store.layout import LayerRange
from tests.backends.stepped_store import FINGERPRINT, LAYOUT, NODE, SteppedStore, block_of, token_kv

VOCABULARY = 60
CONTEXT_TOKENS = 48
PAGES = 20


def next_token(kv: bytes) -> int:
    return int(kv[0]) % VOCABULARY


def answer_of(prompt: Sequence[int], tokens: int) -> list[int]:
    """What any right pair of workers answers."""
    kv, found = bytes(8), []
    for token_id in prompt:
        kv = token_kv(kv, token_id, LAYOUT.layers - 1)
    for _ in range(tokens):
        found.append(next_token(kv))
        kv = token_kv(kv, found[-1], LAYOUT.layers - 1)
    return found


class Line:
    """Stands where an executor would: what is submitted waits for `step`.

    A step may be taken in the middle of another one, but no more at once than there are threads.
    """

    def __init__(self, threads: int, **_: Any) -> None:
        self.waiting: list[Callable[[], Any]] = []
        self._free_threads = threads

    def submit(self, work: Callable[..., Any], *arguments: Any) -> None:
        self.waiting.append(lambda: work(*arguments))

    @property
    def has_work(self) -> bool:
        """Something waits, and a thread for it."""
        return bool(self.waiting) and self._free_threads > 0

    def step(self, index: int = 0) -> None:
        assert self._free_threads > 0, "more at once than there are threads"
        self._free_threads -= 1
        try:
            self.waiting.pop(index)()
        finally:
            self._free_threads += 1

    def shutdown(self, **_: Any) -> None: ...


class AtOnce:
    """Stands where Repliers would."""

    def send(self, reply: Callable[[], None]) -> None:
        reply()

    def close(self, timeout_s: float) -> None: ...


class SteppedWriter(KvWriter):
    def _run(self) -> None:
        """Its thread ends at once; `step` does one thing."""

    @property
    def is_idle(self) -> bool:
        return self._tasks.empty()

    def step(self) -> None:
        task = self._tasks.get_nowait()
        assert task is not None
        self._do(task)


class OneLayerRings(RingLayout):
    """Of two layers a ring has one: the second lies where the first lay."""

    layers_at_once = 1  # type: ignore[assignment]
    per_page = LAYOUT.layers  # type: ignore[assignment]


class SteppedPass:
    """A prompt through the layers of a SteppedEngine."""

    def __init__(
        self, engine: SteppedEngine, token_ids: Sequence[int], rings: Sequence[int]
    ) -> None:
        self._engine, self._token_ids, self._rings = engine, token_ids, rings

    def _token(self, index: int) -> np.ndarray:
        ring, tokens = self._rings[index // LAYOUT.block_tokens], LAYOUT.block_tokens
        data = self._engine.kv_pool[ring * LAYOUT.layer_bytes :][: LAYOUT.layer_bytes]
        token: np.ndarray = data.reshape(tokens, -1)[index % tokens]
        return token

    def compute(self, layer: int, start: int, tokens: int) -> np.ndarray | None:
        before = self._token(start - 1).tobytes() if start else bytes(8)
        for index in range(start, start + tokens):
            before = token_kv(before, self._token_ids[index], layer)
            self._token(index)[:] = np.frombuffer(before, np.uint8)
        self._engine.meanwhile(layer)
        if layer < LAYOUT.layers - 1:
            return None
        logits = np.zeros(VOCABULARY, np.float32)
        logits[next_token(before)] = 1.0
        return logits


class SteppedEngine:
    layout = LAYOUT
    layers = LayerRange(0, LAYOUT.layers)
    vocabulary_tokens = VOCABULARY

    def __init__(
        self, rng: random.Random, meanwhile: Callable[[], None], rings: RingLayout | None
    ) -> None:
        self.pages = PagePool(PAGES)
        self.kv_pool = np.zeros(PAGES * LAYOUT.block_bytes, np.uint8)
        self.fault_share = 0.0
        self.rings = rings
        self._rng = rng
        self._meanwhile = meanwhile

    def import_pages(self, pages: Sequence[int]) -> None: ...

    def export_pages(self, pages: Sequence[int]) -> None: ...

    def import_layer(self, rings: Sequence[int], layer: int) -> None: ...

    def begin_pass(
        self,
        token_ids: Sequence[int],
        start: int,
        rings: Sequence[int],
        scores: PromptScores | None = None,
    ) -> SteppedPass:
        return SteppedPass(self, token_ids, rings)

    def meanwhile(self, layer: int) -> None:
        """Others have their turn, or it fails."""
        self._meanwhile()
        if self._rng.random() < self.fault_share:
            raise RuntimeError(f"the engine failed at layer {layer}")

    def _token(self, work: Work, index: int) -> np.ndarray:
        page = work.pages[index // LAYOUT.block_tokens]
        data = self.kv_pool[page * LAYOUT.block_bytes : (page + 1) * LAYOUT.block_bytes]
        token: np.ndarray = block_of(data)[:, index % LAYOUT.block_tokens]
        return token

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> np.ndarray:
        for layer in range(LAYOUT.layers):
            for work in batch:
                before = self._token(work, work.start - 1)[layer].tobytes() if work.start else None
                for offset, token_id in enumerate(work.token_ids):
                    before = token_kv(before or bytes(8), token_id, layer)
                    target = self._token(work, work.start + offset)
                    target[layer] = np.frombuffer(before, np.uint8)
            if on_layer is not None:
                on_layer(layer)
            self.meanwhile(layer)
        logits = np.zeros((len(batch), VOCABULARY), np.float32)
        for row, work in enumerate(batch):
            logits[row, next_token(self._token(work, work.end - 1)[-1].tobytes())] = 1.0
        return logits


class Outbox:
    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []

    def send(self, address: str, message: Any) -> None:
        self.messages.append((address, message))


class Client:
    """One request's client at both workers, and its frontend."""

    def __init__(self, site: Site, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.site = site
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = SamplingParams(max_tokens=max_tokens)
        self.reserve_tokens = len(prompt) + max_tokens
        self.priority = 0
        self.answer: list[int] = []
        self.error: Exception | None = None
        self.is_over = False

    def prefilled(self, token_id: int, reply: PrefillReply) -> None:
        self.answer.append(token_id)
        if self.sampling.max_tokens == 1:
            self._end()
            return
        ids = np.array([*self.prompt, token_id], np.int32)
        request = DecodeRequest(
            self.request_id,
            len(self.prompt),
            self.sampling,
            "",
            self.site.handed_over(reply),
            0,
            "",
            priority=self.priority,
        )
        try:
            self.site.decode.submit(request, ids, self)
        except ServingError as error:
            self.fail(error)

    def decoded(self, token_ids: list[int], reply: DecodeReply) -> None:
        self.answer += token_ids
        self._end()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        assert not self.is_over, f"{self.request_id} was answered twice"
        self.is_over = True
        self.site.ended(self)


class Site:
    def __init__(
        self,
        seed: int,
        monkeypatch: pytest.MonkeyPatch,
        is_layerwise: bool = False,
        whole_bytes_max: int | None = None,
    ) -> None:
        """`whole_bytes_max`: see StepPrefill; drawn by the seed where the test does not care."""
        self._is_layerwise = is_layerwise
        self.rng = random.Random(seed)
        if whole_bytes_max is None:
            whole_bytes_max = self.rng.choice([0, WHOLE_BYTES_MAX])
        self.store = SteppedStore(self.rng)
        self.store.meanwhile = self._turn_meanwhile
        self._turning = False
        self.outbox = Outbox()
        self.clients: list[Client] = []
        self.damage_share = 0.0  # of the replies of prefill, which then name other blocks
        monkeypatch.setattr(worker_module, "WorkerProcess", self._process)
        monkeypatch.setattr(worker_module, "KvWriter", SteppedWriter)
        monkeypatch.setattr(worker_module, "ThreadPoolExecutor", Line)
        monkeypatch.setattr(worker_module, "IDLE_WAIT_S", 0.0)
        monkeypatch.setattr(decode_worker, "Repliers", AtOnce)
        monkeypatch.setattr(worker_module.JobWorker, "_run", lambda worker: None)
        common = {"block_tokens": LAYOUT.block_tokens, "kv_pages": PAGES, "store_node": NODE}
        self.prefill = PrefillWorker(
            "prefill_0",
            PrefillConfig(chunk_tokens=8, queue_requests_max=6, **common),
            "",  # type: ignore[arg-type]
            StepPrefill(self._engine(), whole_bytes_max),
        )
        self.decode = DecodeWorker(
            "decode_0",
            DecodeConfig(slots=4, queue_requests_max=6, **common),
            "",  # type: ignore[arg-type]
            StepDecode(self._engine()),
        )
        self.workers: tuple[Any, Any] = (self.prefill, self.decode)

    def _engine(self) -> Any:
        rings = OneLayerRings(LAYOUT.layers) if self._is_layerwise else None
        return SteppedEngine(self.rng, self.meanwhile, rings)

    def _process(
        self,
        role: str,
        worker_id: str,
        _config: Any,
        _repository: str,
        _slots_max: int,
        driver: Any,
        *_given: Any,
    ) -> Any:
        """Stands where a WorkerProcess would."""
        info = SimpleNamespace(role=role, prefill_coefficients=(), decode_coefficients=())
        return SimpleNamespace(
            worker_id=worker_id,
            incarnation="life",
            store=self.store,
            info=info,
            is_lost=False,
            outbox=self.outbox,
            owners=LeaseKeeper(self.store, 30.0),  # type: ignore[arg-type]
            steps=StepTimes(),
            watch=StepWatch(),
            observations=Observations(),
            fingerprint=FINGERPRINT,
            context_tokens_max=CONTEXT_TOKENS,
            call_limits=CallLimits(CONTEXT_TOKENS, VOCABULARY),
            rings=driver.rings,
            join=lambda: None,
            leave=lambda: None,
        )

    # -- the frontend

    def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int = 0,
        place_s: float = 0.0,
        priority: int = 0,
    ) -> Client:
        client = Client(self, f"r{len(self.clients)}", prompt, max_tokens)
        client.sampling = replace(client.sampling, seed=seed)
        client.priority = priority
        self.clients.append(client)
        whole = prompt + answer_of(prompt, max_tokens)
        self.store.expect(whole)
        names = [object_key(client.request_id, i) for i in range(len(whole))]
        self.store.expect_objects(prompt, names)
        request = PrefillRequest(
            client.request_id,
            len(prompt),
            client.sampling,
            "",
            0,
            "decode" if max_tokens > 1 else "",
            "",
            client.reserve_tokens,
            place_s=place_s,
        )
        try:
            self.prefill.submit(request, np.array(prompt, np.int32), client)
        except ServingError as error:
            client.fail(error)
        return client

    def handed_over(self, reply: PrefillReply) -> list[Any]:
        blocks = list(reply.blocks)
        if self.rng.random() >= self.damage_share:
            return blocks
        chosen = self.rng.randrange(len(blocks))
        if self.rng.random() < 0.5:
            del blocks[chosen]
        else:
            blocks[chosen] = blocks[self.rng.randrange(len(blocks))]
        return blocks

    def ended(self, client: Client) -> None:
        """As the frontend does: whatever became of it, nobody is left with a part of it."""
        if client.error is not None:
            self.store.release(client.request_id)
            self.decode._on_message(Stop(client.request_id, "over"))

    # -- threads

    def things_to_do(self) -> list[Callable[[], None]]:
        """What threads other than the engines' could do next."""
        found: list[Callable[[], None]] = []
        for worker in self.workers:
            if not worker.writer.is_idle:
                found.append(worker.writer.step)
        if self.prefill._loading.has_work:  # type: ignore[attr-defined]
            waiting = self.prefill._loading.waiting  # type: ignore[attr-defined]
            index = self.rng.randrange(min(2, len(waiting)))
            found.append(lambda: self.prefill._loading.step(index))  # type: ignore[attr-defined]
        if self.decode._loading.has_work:  # type: ignore[attr-defined]
            found.append(self.decode._loading.step)  # type: ignore[attr-defined]
        if self.outbox.messages:
            found.append(self._deliver)
        if self.store.late:
            found.append(self.store.arrive)
        return found

    def _deliver(self) -> None:
        address, message = self.outbox.messages.pop(0)
        if address == "decode":
            self.decode._on_message(message)

    def meanwhile(self) -> None:
        """In the middle of an engine step."""
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            if todo := self.things_to_do():
                self.rng.choice(todo)()

    def turn(self, worker: Any) -> None:
        self._turning = True
        worker._turn()
        self._turning = False

    def _turn_meanwhile(self) -> None:
        """An engine's turn in the middle of a read, unless the read is in the middle of a turn."""
        if not self._turning and self.rng.random() < 0.3:
            self.turn(self.rng.choice(self.workers))

    def settle(self) -> None:
        """No more faults; until nobody has anything to do."""
        self.store.fault_share = self.store.late_share = self.store.lost_share = 0.0
        for worker in self.workers:
            worker.driver.engine.fault_share = 0.0
        for _ in range(5_000):
            if all(client.is_over for client in self.clients) and not self.things_to_do():
                break
            for worker in self.workers:
                self.turn(worker)
            self.meanwhile()
        for worker in self.workers:  # what was stopped after it was over
            self.turn(worker)
        while todo := self.things_to_do():
            todo[0]()

    def check_empty(self) -> None:
        """Nobody holds anything for requests that are over."""
        for client in self.clients:
            assert client.is_over, f"{client.request_id} was never answered"
        for worker in self.workers:
            worker.check()
            name = worker.process.worker_id
            assert not worker.jobs, (name, worker.jobs)
            assert worker._pages.used_pages == 0, f"{name} lost pages"
            assert worker.batching.admitted == worker.batching.waiting == 0
            assert not len(worker.process.owners), f"{name} renews leases of nobody"
        assert not len(self.prefill._single_flight), "claims of nobody"
        assert not len(self.decode._arrivals), "a place is reserved for nobody"
        assert not self.store.leases, f"leases of nobody: {list(self.store.leases)}"
        self.store.check()
