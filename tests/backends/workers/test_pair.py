"""Both workers over a real store in one process: every engine and hand-over gives right tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.engine.connected import host_memory
from backends.engine.connected.messages import ENVIRONMENT
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import Cancelled, WorkerGone, WorkerUnavailable
from backends.workers import step_times, worker_process
from bench.harness.generate import generate
from tests.backends.small_tokenizers import DEMO
from tests.backends.trtllm.conftest import fake_package  # noqa: F401  (a fixture)
from tests.backends.workers.pair import WAIT_S, Asked, Pair, pairs, prompt
from tests.e2e.trtllm import expected

BLOCK = 64
ENGINES = ("torch", "store", "native")  # tensorrt_llm with either hand-over


def wanted(kind: str, ids: list[int], tokens: int) -> list[int]:
    if kind != "torch":
        return expected(ids, tokens)
    engine = TorchEngine.load(DEMO, pages_max=32, block_tokens=BLOCK)
    return generate(engine, [ids], SamplingParams(max_tokens=tokens))[0]


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    parameters: dict[str, str] = {}
    if kind != "torch":
        request.getfixturevalue("fake_package")
        monkeypatch.setenv(ENVIRONMENT, "")
        shm = tmp_path / "shm"
        shm.mkdir()
        monkeypatch.setattr(host_memory, "SHM", shm)
        parameters = {"engine": "tensorrt_llm", "page_tokens": "32", "handoff": kind}
    yield from pairs(tmp_path, monkeypatch, **parameters)


@pytest.mark.slow
def test_prompts_of_every_length_get_the_tokens_of_the_model(pair: Pair, kind: str) -> None:
    for length in (1, 31, 32, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
        ids = prompt(length, length)
        for _ in ("a miss", "a hit"):
            assert pair.ask(ids).wait() == wanted(kind, ids, 8), length
    pair.wait_until_idle()


@pytest.mark.slow
def test_requests_that_come_together_get_the_same_tokens_as_alone(pair: Pair, kind: str) -> None:
    prompts = [prompt(number, 90 + 40 * number) for number in range(5)]
    asked = [pair.ask(ids, max_tokens=20) for ids in prompts]
    for ids, each in zip(prompts, asked, strict=True):
        assert each.wait() == wanted(kind, ids, 20)
    pair.wait_until_idle()


def test_a_cached_prefix_is_not_computed_again(pair: Pair, kind: str) -> None:
    ids = prompt(3, 3 * BLOCK + 5)
    pair.ask(ids, max_tokens=1).wait()
    pair.wait_until_idle()
    again = pair.ask(ids, max_tokens=1)
    again.wait()
    assert again.prefill_reply is not None
    assert again.prefill_reply.cached_tokens >= 3 * BLOCK


def test_a_decode_worker_that_is_quicker_than_the_saving_of_the_prompt_costs_no_block(
    pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that hand KV over themselves answer a prompt before it is in the store."""
    if kind != "native":
        pytest.skip("the prompt is in the store before it is answered")
    ids, driver, writer = prompt(4, 3 * BLOCK + 5), pair.prefill.driver, pair.prefill.writer
    asked = Asked(pair, "quick", ids)
    is_answered, has_left, committed = threading.Event(), threading.Event(), list[Any]()
    saved, commit = driver.saved, writer._commit  # type: ignore[attr-defined]

    def saved_late(*arguments: Any) -> None:
        assert is_answered.wait(WAIT_S)
        saved(*arguments)

    def commit_late(*arguments: Any) -> None:
        asked.wait_over()
        pair.decode.writer._tasks.put(has_left.set)  # behind what it gives up
        assert has_left.wait(WAIT_S)
        commit(*arguments)
        committed.append(arguments)

    monkeypatch.setattr(driver, "saved", saved_late)
    monkeypatch.setattr(writer, "_commit", commit_late)
    asked.before_decode = is_answered.set
    pair.submit(asked)
    assert asked.wait() == wanted(kind, ids, 8)
    pair.wait_until_idle()
    assert asked.error is None and committed, "its slots were taken away"
    assert not len(pair.prefill.process.owners) and not len(pair.decode.process.owners)


def test_the_next_turn_finds_what_decode_has_generated(pair: Pair, kind: str) -> None:
    if kind == "native":
        pytest.skip("what a native decode engine generates does not go to the store")
    ids = prompt(5, 100)
    answer = pair.ask(ids, max_tokens=3 * BLOCK).wait()
    pair.wait_until_idle()
    conversation = [*ids, *answer, 7, 8, 9]
    blocks = (len(ids) + len(answer) - 1) // BLOCK  # the last token's KV is nobody's
    again = pair.ask(conversation)
    assert again.wait() == wanted(kind, conversation, 8)
    assert again.prefill_reply is not None
    assert again.prefill_reply.cached_tokens == blocks * BLOCK


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_that_is_stopped_is_answered_and_leaves_nothing(
    pair: Pair, kind: str, role: str
) -> None:
    ids = prompt(6, 200)
    if role == "prefill":
        asked = pair.ask(ids, max_tokens=300)
        pair.prefill.stop(asked.request_id)
        pair.decode.stop(asked.request_id)
    else:
        asked = pair.ask(ids, max_tokens=300)
        pair.wait_for_decode()
        pair.decode.stop(asked.request_id)
    asked.wait_over()
    if asked.error is not None:
        assert isinstance(asked.error, Cancelled)
    else:
        assert asked.decode_reply is not None
        assert asked.decode_reply.finish_reason == "cancelled"
        assert len(asked.output_ids) < 300
    pair.wait_until_idle()
    assert pair.ask(ids).wait() == wanted(kind, ids, 8), "others are not disturbed"


def test_what_a_worker_reports_is_of_now(pair: Pair, kind: str) -> None:
    pair.ask(prompt(7, 100)).wait()
    pair.wait_until_idle()
    for worker in (pair.prefill, pair.decode):
        report = worker.report()
        assert (report.queue_requests, report.running, report.pages_used) == (0, 0, 0)
        assert not report.is_draining
        assert worker.process.steps.steps > 0 or kind != "torch"
    series = dict.fromkeys(name for name, _, _ in pair.decode.driver.series())
    assert bool(series) == (kind != "torch" and bool(pair.decode.driver.engine.stats.raw))  # type: ignore[attr-defined]


def test_pages_that_are_on_their_way_back_are_no_load(pair: Pair, kind: str) -> None:
    """The conductor would take them for those of somebody else's requests until the next report."""
    at_work, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        at_work.set()
        assert goes_on.wait(WAIT_S)

    decode = pair.decode
    decode.writer._tasks.put(hold)
    assert at_work.wait(WAIT_S)
    pair.ask(prompt(9, 100), max_tokens=50).wait()
    assert decode.report().running == 0 and decode.report().pages_used == 0
    assert decode.process.engine.pages.used_pages >= 2, "nobody has got them yet"
    goes_on.set()
    pair.wait_until_idle()
    assert decode.process.engine.pages.used_pages == 0


def test_a_worker_that_closes_finishes_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in pairs(tmp_path, monkeypatch):
        asked = pair.ask(prompt(8, 100), max_tokens=50)
        pair.wait_for_decode()
    assert asked.wait() == wanted("torch", prompt(8, 100), 50)
    assert not pair.directory.workers(), "both have left the cluster"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_whose_engine_hangs_leaves_and_its_clients_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    ended, goes_on = threading.Event(), threading.Event()

    def end(*steps: Callable[[], None]) -> None:
        for step in steps:
            step()
        ended.set()

    monkeypatch.setattr(worker_process, "end_process", end)
    monkeypatch.setattr(worker_process, "WATCH_S", 0.02)
    monkeypatch.setattr(step_times, "HUNG_S_MIN", 0.3)
    for pair in pairs(tmp_path, monkeypatch):
        hung = getattr(pair, role)
        forward = hung.driver.engine.forward

        def hang(*given: Any, forward: Any = forward) -> Any:
            assert goes_on.wait(WAIT_S)
            return forward(*given)

        monkeypatch.setattr(hung.driver.engine, "forward", hang)
        error = pair.ask(prompt(9, 100)).wait_failed()
        assert isinstance(error, WorkerUnavailable) and "an engine step" in str(error)
        assert ended.wait(WAIT_S)
        left = [info.worker_id for info in pair.directory.workers()]
        assert left == ["decode_0" if role == "prefill" else "prefill_0"]
        with pytest.raises(WorkerGone):
            if role == "prefill":
                pair.ask(prompt(10, 10))
            else:
                raise pair.ask(prompt(10, 10)).wait_failed()
        goes_on.set()
