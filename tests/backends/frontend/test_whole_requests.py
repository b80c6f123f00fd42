"""A frontend and both workers in one process, with all their threads and messages and no server:
only Triton between them is a stand-in, which hands calls over as they are."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from backends.config_pbtxt import FrontendConfig
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import Cancelled, InvalidRequest, ServingError, WorkerUnavailable
from backends.frontend import cluster_view
from backends.frontend.cluster_view import ClusterView
from backends.frontend.frontend import Frontend
from backends.frontend.token_streams import TokenStreams
from backends.tensors import string_tensor
from backends.text.tokenizer import Tokenizer
from backends.workers.protocol import (
    REPLY_BODY,
    REPLY_IDS,
    REQUEST_BODY,
    REQUEST_IDS,
    DecodeReply,
    DecodeRequest,
    PrefillReply,
    PrefillRequest,
    WorkerFailure,
    encode,
    open_outbox,
)
from bench.harness.generate import generate
from conductor.config import ConductorConfig
from tests.backends.asking import array
from tests.backends.small_tokenizers import DEMO
from tests.backends.workers.pair import WAIT_S, Pair, pairs

Outputs = dict[str, np.ndarray]


def prompt(number: int, tokens: int) -> list[int]:
    return [20 + (number * 7919 + index * index * (number + 1)) % 2000 for index in range(tokens)]


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine.load(DEMO, pages_max=32, block_tokens=64)


class WorkerReply:
    """A worker's answer to one call, in the shape of the worker protocol."""

    def __init__(self) -> None:
        self.outputs: queue.Queue[Outputs | Exception] = queue.Queue()

    def prefilled(self, token_id: int, reply: PrefillReply) -> None:
        self._put(np.array([token_id], np.int32), reply)

    def decoded(self, token_ids: list[int], reply: DecodeReply) -> None:
        self._put(np.array(token_ids, np.int32), reply)

    def fail(self, error: Exception) -> None:
        assert isinstance(error, ServingError), error
        self._put(np.zeros(0, np.int32), WorkerFailure(error.wire_message()))

    def is_cancelled(self) -> bool:
        return False

    def _put(self, ids: np.ndarray, body: msgspec.Struct) -> None:
        self.outputs.put({REPLY_IDS: ids, REPLY_BODY: string_tensor(encode(body))})


class Calls:
    """Calls to the workers of a pair; `before` is called with the model of each."""

    def __init__(self, pair: Pair) -> None:
        self._workers: dict[str, Any] = {"prefill_0": pair.prefill, "decode_0": pair.decode}
        self._running: dict[str, WorkerReply] = {}
        self.before: Callable[[str], None] = lambda model: None
        self.models: list[str] = []

    def probe(self, address: str) -> None: ...

    def __call__(
        self,
        address: str,
        model: str,
        inputs: Mapping[str, np.ndarray],
        outputs: list[str],
        request_id: str,
    ) -> Iterator[Outputs]:
        self.models.append(model)
        self.before(model)
        kind = PrefillRequest if model == "prefill_0" else DecodeRequest
        request = msgspec.msgpack.decode(inputs[REQUEST_BODY][0], type=kind)
        reply = self._running[request_id] = WorkerReply()
        try:
            self._workers[model].submit(request, inputs[REQUEST_IDS], reply)
        except ServingError as error:
            reply.fail(error)
        found = reply.outputs.get(timeout=WAIT_S)
        if isinstance(found, Exception):
            raise found
        yield found

    def keep(self, addresses: set[str]) -> None: ...

    def cancel(self, request_id: str) -> None:
        self._running[request_id].outputs.put(WorkerUnavailable("the call was cancelled"))


class Client:
    """Who asked: collects what comes."""

    outputs = frozenset({"output_ids", "finish_reason", "text_output"})

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.messages = 0
        self.reason = ""
        self.error: Exception | None = None
        self.is_gone = False
        self.on_message: Callable[[], None] = lambda: None
        self._is_over = threading.Event()

    def send(self, outputs: Outputs, is_final: bool = False) -> None:
        assert not self._is_over.is_set(), "nothing comes behind the end"
        self.ids += outputs["output_ids"].tolist()
        self.messages += 1
        self.reason = outputs["finish_reason"][0].decode()
        self.on_message()
        if is_final:
            self._is_over.set()

    def finish(self) -> None:
        self._is_over.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._is_over.set()

    def is_cancelled(self) -> bool:
        return self.is_gone

    def wait(self) -> list[int]:
        assert self._is_over.wait(WAIT_S), "it was never answered"
        assert self.error is None, self.error
        return self.ids


class Site:
    def __init__(self, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair = pair
        monkeypatch.setattr(cluster_view, "DirectoryClient", lambda address: pair.directory)
        monkeypatch.setattr(cluster_view, "TICK_S", 3600.0)
        self.cluster = ClusterView(
            ConductorConfig(), f"ipc://{tmp_path}/nobody", f"ipc://{tmp_path}/events"
        )
        self.decide = self.cluster.decide
        self.cluster.decide = self._decide  # type: ignore[method-assign]
        self.cluster._on_snapshot(pair.directory.snapshot())
        self.calls, self.outbox = Calls(pair), open_outbox()
        self.streams = TokenStreams(f"ipc://{tmp_path}/s/frontend", 4_000)
        self.frontend = Frontend(
            FrontendConfig(cancel_poll_s=0.01),
            Tokenizer.load(DEMO),
            self.cluster,
            cast(Any, self.calls),
            self.streams,
            self.outbox,
        )

    def _decide(self, *asked: Any, **named: Any) -> Any:
        """Nobody feeds events: what the directory knows is read when somebody asks."""
        self.cluster._on_snapshot(self.pair.directory.snapshot())
        return self.decide(*asked, **named)

    def ask(
        self, ids: list[int], parameters: dict[str, Any] | None = None, **inputs: Any
    ) -> Client:
        client = Client()
        self.submit(client, ids, parameters, **inputs)
        return client

    def submit(
        self,
        client: Client,
        ids: list[int],
        parameters: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> None:
        given = {"input_ids": ids, "max_tokens": 8, "end_id": -1, "stream": True, **inputs}
        arrays = {name: array(name, value) for name, value in given.items()}
        self.frontend.submit(arrays, parameters or {}, client)

    def lose_decode_at(self, client: Client, messages: int) -> None:
        """The directory says that the decode worker is gone when the client has so many."""
        lost = threading.Event()

        def lose() -> None:
            if client.messages == messages and not lost.is_set():
                lost.set()
                info = self.pair.decode.process.info
                threading.Thread(
                    target=self.frontend._worker_down, args=(info.worker_id, info.incarnation, 1e18)
                ).start()

        client.on_message = lose

    def check_idle(self) -> None:
        """Nobody holds anything for requests that are over."""
        assert self.frontend.live.wait_until_empty(WAIT_S)
        self.pair.wait_until_idle()
        assert not self.streams._streams and not self.frontend._abandoned
        self.cluster._check()
        assert not self.cluster._conductor._cluster.in_flight

    def close(self) -> None:
        self.frontend.close(WAIT_S)
        self.cluster.close()
        self.outbox.close()
        self.streams.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for pair in pairs(tmp_path, monkeypatch):
        made = Site(pair, tmp_path, monkeypatch)
        try:
            yield made
        finally:
            made.close()


def wanted(engine: TorchEngine, ids: list[int], tokens: int) -> list[int]:
    return generate(engine, [ids], SamplingParams(max_tokens=tokens))[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [True, False])
def test_prompts_of_every_length_get_the_tokens_of_the_model(
    site: Site, engine: TorchEngine, is_stream: bool
) -> None:
    for length in (1, 63, 64, 65, 200):
        ids = prompt(length, length)
        for _ in ("a miss", "a hit"):
            client = site.ask(ids, stream=is_stream)
            assert client.wait() == wanted(engine, ids, 8), length
            assert client.reason == "length"
            assert (client.messages > 1) == is_stream
    site.check_idle()


@pytest.mark.slow
def test_requests_that_come_together_get_the_same_tokens_as_alone(
    site: Site, engine: TorchEngine
) -> None:
    prompts = [prompt(number, 90 + 40 * number) for number in range(6)]
    clients = [site.ask(ids, max_tokens=20) for ids in prompts]
    for ids, client in zip(prompts, clients, strict=True):
        assert client.wait() == wanted(engine, ids, 20)
    site.check_idle()


def test_a_client_that_leaves_in_the_middle_frees_everything(site: Site) -> None:
    client = Client()

    def leave() -> None:
        client.is_gone = client.messages >= 2

    client.on_message = leave
    site.submit(client, prompt(1, 100), max_tokens=3_000)
    assert len(client.wait()) < 3_000
    site.check_idle()


def test_a_timeout_frees_everything_and_says_so(site: Site) -> None:
    client = site.ask(prompt(1, 100), {"timeout_ms": 50}, max_tokens=3_000)
    with pytest.raises(AssertionError, match="its timeout of 50 ms has passed"):
        client.wait()
    assert isinstance(client.error, WorkerUnavailable)
    site.check_idle()


@pytest.mark.slow
def test_a_request_whose_worker_is_gone_goes_on_with_the_same_tokens(
    site: Site, engine: TorchEngine
) -> None:
    """The directory says so in the middle of the stream, while the call hangs."""
    ids, client = prompt(2, 130), Client()
    site.lose_decode_at(client, 3)
    site.submit(client, ids, max_tokens=200)
    assert client.wait() == wanted(engine, ids, 200)
    assert site.calls.models.count("prefill_0") == 2
    site.check_idle()


def test_a_worker_that_stops_a_request_by_itself_costs_another_attempt(
    site: Site, engine: TorchEngine
) -> None:
    ids = prompt(3, 70)
    refused: list[str] = []

    def refuse(model: str) -> None:
        if model == "decode_0" and len(refused) < 2:
            refused.append(model)
            raise WorkerUnavailable("decode_0: internal_error: ValueError: x")

    site.calls.before = refuse
    assert site.ask(ids).wait() == wanted(engine, ids, 8)
    assert site.calls.models == ["prefill_0", "decode_0"] * 3
    site.check_idle()


def test_bad_input_is_refused_before_anybody_is_called(site: Site) -> None:
    client = site.ask([], temperature=-1.0)
    with pytest.raises(AssertionError):
        client.wait()
    assert isinstance(client.error, InvalidRequest) and not site.calls.models
    site.check_idle()


def test_stopped_requests_end_with_the_word_for_it(site: Site) -> None:
    client = site.ask(prompt(1, 100), max_tokens=3_000)
    [request] = site.frontend.live.all()
    site.frontend.close(timeout_s=0.0)
    assert request.state.error is None or isinstance(request.state.error, ServingError)
    with pytest.raises(AssertionError, match="shutting down"):
        client.wait()
    assert not isinstance(client.error, Cancelled)
