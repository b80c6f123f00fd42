"""A real group of prefill workers and a decode worker in one process: tokens, losses, leaks."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from backends.config_pbtxt import checkpoint_folder
from backends.engine.interface import Work
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import ConfigError, InvalidRequest, WorkerGone, WorkerUnavailable
from backends.text.tokenizer import Tokenizer
from backends.token_logprobs import token_logprobs
from backends.workers.pipeline import first_stage
from backends.workers.protocol import GroupBegins, PrefixLoaded, PrefixWanted, StageBeat
from bench.harness.generate import generate
from conductor import Conductor, ConductorConfig
from mooncake_store.errors import StoreError
from mooncake_store.records.events import NodeUp, WorkerReported, WorkerUp
from tests.backends.workers.pair import Pair, pairs
from tests.conductor import fleet as conductor_fleet

SEED = int(os.environ.get("MOONCAKE_TEST_SEED", "1"))
OUTPUT_TOKENS = 6


# Three stages have one between the first and the last; tests/e2e has groups of both lengths.
@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.long), 3])
def group(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    for pair in pairs(tmp_path, monkeypatch, stages=request.param, block_tokens="16"):
        pair.wait_until_whole()
        yield pair


def prompts(chance: random.Random) -> list[list[int]]:
    """Of all lengths around blocks and chunks, some with a prefix in common."""
    shared = [chance.randrange(3, 2000) for _ in range(80)]
    lengths = (1, 15, 16, 17, 100, 513)
    own = [[chance.randrange(3, 2000) for _ in range(length)] for length in lengths]
    return [*own, *([*shared, *tail[:40]] for tail in own[2:])]


@cache
def whole_engine() -> TorchEngine:
    return TorchEngine.load(checkpoint_folder("demo", ""), pages_max=64, block_tokens=16)


def expected(prompt: list[int], tokens: int = OUTPUT_TOKENS) -> list[int]:
    [output] = generate(whole_engine(), [prompt], SamplingParams(max_tokens=tokens))
    return output


@pytest.mark.slow
def test_prompts_with_and_without_a_cached_prefix_get_the_tokens_of_the_whole_model(
    group: Pair,
) -> None:
    chance = random.Random(SEED)
    chosen = prompts(chance)
    for turn in range(2):
        asked = [group.ask(prompt, max_tokens=OUTPUT_TOKENS) for prompt in chosen]
        for prompt, each in zip(chosen, asked, strict=True):
            assert each.wait() == expected(prompt), f"turn {turn}, {len(prompt)} tokens"
            reply = each.prefill_reply
            assert reply is not None
            cached_blocks = (len(prompt) - 1) // 16 if turn else 0
            assert reply.cached_tokens >= cached_blocks * 16, "every stage had its layers"
    group.wait_until_idle()


def test_the_last_stage_says_logprobs_and_holds_the_token_to_the_schema(group: Pair) -> None:
    prompt = [31, 57, 90] * 30
    free = group.ask(prompt, max_tokens=1, top_logprobs=2)
    [token_id] = free.wait()
    guided = group.ask(prompt, max_tokens=1, end_ids=(0,), guide='{"const": true}')
    tokenizer = Tokenizer.load(checkpoint_folder("demo", ""))
    [first] = guided.wait()
    assert first != token_id and "true".startswith(tokenizer.decode([first]))
    assert free.prefill_reply is not None and guided.prefill_reply is not None
    [found] = free.prefill_reply.logprobs
    pages = whole_engine().pages.take(6)
    assert pages is not None
    expected = token_logprobs(whole_engine().forward([Work(prompt, 0, pages)])[0], token_id, 2)
    whole_engine().pages.release(pages)
    assert found.top_ids == expected.top_ids and found.top_ids[0] == token_id
    assert found.log_prob == pytest.approx(expected.log_prob, abs=1e-4)
    assert found.top_log_probs == pytest.approx(expected.top_log_probs, abs=1e-4)
    assert guided.prefill_reply.logprobs == []
    group.wait_until_idle()


def test_a_schema_that_the_last_stage_cannot_follow_is_the_request_s_fault(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise InvalidRequest("guided_json: it is too large")

    monkeypatch.setattr(group.stages[-1]._guides, "guide", lost)
    guided = group.ask([31, 57], max_tokens=1, end_ids=(0,), guide='{"const": true}')
    guided.wait_over()
    assert isinstance(guided.error, InvalidRequest) and "it is too large" in str(guided.error)
    assert group.ask([31, 57], max_tokens=1).wait() == expected([31, 57], 1)


def test_a_stage_that_leaves_fails_what_is_under_way_and_joins_again_later(group: Pair) -> None:
    prompt = [7] * 600
    before = group.ask(prompt, max_tokens=1)
    group.stages.pop(0).close(30.0)
    before.wait_over()  # it went well, or says what happened
    assert before.error is None or isinstance(before.error, WorkerUnavailable)
    with pytest.raises(WorkerGone, match="it waits for stage 1"):
        group.ask(prompt, max_tokens=1)
    assert group.prefill.report().is_draining, "nothing is routed to a group with a stage missing"
    group.stages.insert(0, group.start_stage(1))
    group.wait_until_whole()
    assert group.ask(prompt, max_tokens=3).wait() == expected(prompt, 3)
    group.wait_until_idle()


def test_a_stage_whose_computing_fails_fails_the_requests_of_the_step_and_goes_on(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = group.stages[0]._engine

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_run", broken)
        error = group.ask([5] * 40, max_tokens=1).wait_failed()
        assert isinstance(error, WorkerUnavailable)
        assert "out of memory" in str(error)
    assert group.ask([5] * 40, max_tokens=2).wait() == expected([5] * 40, 2)
    group.wait_until_idle()


def test_requests_that_are_stopped_while_their_chunks_are_at_another_stage_leave_nothing_behind(
    group: Pair,
) -> None:
    chance = random.Random(SEED)
    asked = [
        group.ask([chance.randrange(3, 2000) for _ in range(900)], max_tokens=1) for _ in range(6)
    ]
    for each in chance.sample(asked, 4):
        group.prefill.stop(each.request_id)
    for each in asked:
        each.wait_over()
    group.wait_until_idle()
    assert not group.directory.stats().leases


def test_a_lost_step_breaks_the_group_which_begins_anew(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = group.prefill.driver._window
    with group.prefill.lock:
        window.next_number += 1  # as if a step had been sent that never arrived
    error = group.ask([9] * 64, max_tokens=1).wait_failed()
    assert isinstance(error, WorkerUnavailable)
    group.wait_until_whole()
    assert group.ask([9] * 64, max_tokens=2).wait() == expected([9] * 64, 2)
    group.wait_until_idle()


def test_stages_that_do_not_fit_together_are_refused_with_all_that_is_wrong(group: Pair) -> None:
    stages = group.prefill.config.pipeline_stages
    with pytest.raises(ConfigError) as caught:
        group.start_stage(1, name="another", kv_pages="32", context_tokens_max="128")
    said = str(caught.value)
    assert f"another/config.pbtxt has {2 * stages + 1} mistake(s)" in said
    for words in (
        "pages of kv_bytes is 32",
        "context_tokens_max is 128",
        "has the same pipeline_stage",
    ):
        assert words in said
    assert group.ask([9] * 64, max_tokens=2).wait() == expected([9] * 64, 2)


def test_a_later_stage_takes_no_requests(group: Pair) -> None:
    with pytest.raises(WorkerGone, match="stage 1 of pipeline group g0"):
        group.stages[0].submit(None, None, None)


def test_the_conductor_takes_the_stages_for_one_candidate(group: Pair) -> None:
    workers = group.directory.workers()
    made = Conductor(ConductorConfig())
    nodes = {info.node_id for info in workers}
    made.on_events([NodeUp(conductor_fleet.node(node_id)) for node_id in nodes], 0.0)
    made.on_events([WorkerUp(info) for info in workers], 0.0)
    made.on_events([WorkerReported(group.prefill.report())], 0.0)
    [candidate] = made.explain(conductor_fleet.prompt("r1", prompt_tokens=600), 0.0).candidates
    config = group.prefill.config
    assert candidate.prefill.worker_id == group.prefill.process.worker_id
    assert candidate.pipeline_stages == config.pipeline_stages
    assert group.prefill.process.info.chunk_tokens == config.chunk_tokens
    predicted = candidate.predicted
    assert 0 < predicted.fill_s < predicted.prefill_s


def test_a_request_whose_prefix_is_lost_on_its_way_to_a_stage_leaves_when_the_group_begins_anew(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, outbox = [9] * 64, group.prefill.process.outbox
    assert group.ask(prompt, max_tokens=2).wait() == expected(prompt, 2)
    send = outbox.send

    def send_but_prefixes(inbox: str, message: Any, *attached: Any) -> bool:
        return True if isinstance(message, PrefixWanted) else send(inbox, message, *attached)

    monkeypatch.setattr(first_stage, "HUNG_S_MIN", 0.0, raising=False)
    impatient = dataclasses.replace(group.prefill.config, transfer_s_max=0.1)
    monkeypatch.setattr(group.prefill.driver, "config", impatient)
    with monkeypatch.context() as patch:
        patch.setattr(outbox, "send", send_but_prefixes)
        assert isinstance(group.ask(prompt, max_tokens=2).wait_failed(), WorkerUnavailable)
    group.wait_until_whole()
    assert group.ask(prompt, max_tokens=2).wait() == expected(prompt, 2)
    group.wait_until_idle()


def test_a_failed_load_of_a_prefix_is_answered_after_the_last_late_read(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, stage = [9] * 64, group.stages[0]
    assert group.ask(prompt, max_tokens=2).wait() == expected(prompt, 2)
    pending: list[set[int]] = [set(range(64)), set(range(64)), set()]
    answers: list[tuple[int, int]] = []
    answer = stage._answer

    def fail(*_: object) -> int:
        raise StoreError("a transfer passed its deadline")

    def noted(message: Any) -> None:
        if isinstance(message, PrefixLoaded):
            answers.append((message.blocks, len(pending)))
        answer(message)

    monkeypatch.setattr(stage._loader, "load_copies", fail)
    monkeypatch.setattr(stage._loader, "pending_pages", lambda: pending.pop(0))
    monkeypatch.setattr(stage, "_answer", noted)
    assert group.ask(prompt, max_tokens=2).wait() == expected(prompt, 2)
    assert answers == [(0, 0)], "blocks, and looks at late reads that were left"
    group.wait_until_idle()


def break_group(group: Pair) -> None:
    with group.prefill.lock:
        driver = group.prefill.driver
        driver._broken(driver._group.end("a test ends the epoch"))


def test_a_stage_whose_writes_of_an_ended_epoch_are_slow_writes_no_more_than_the_one_under_way(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = group.stages[0]
    is_writing, may_write, writes = threading.Event(), threading.Event(), []
    write = stage.process.store.write

    def slow_write(*arguments: Any) -> Any:
        writes.append(arguments)
        is_writing.set()
        assert may_write.wait(30.0)
        return write(*arguments)

    monkeypatch.setattr(stage.process.store, "write", slow_write)
    asked = group.ask([7] * 600, max_tokens=1)
    assert is_writing.wait(30.0)
    break_group(group)
    asked.wait_failed()
    with group.prefill.lock:
        assert group.prefill.lock.wait_for(lambda: group.prefill.driver._group.epoch, 30.0)
    watch = stage.process.watch
    deadline_s = time.monotonic() + 30.0
    while stage._epoch and time.monotonic() < deadline_s:
        stage._thread.join(0.01)
    assert not stage._epoch, "it has heard that an epoch begins"
    assert watch.age_s(time.monotonic() + 1.0) > 0.0, "who waits for ever here is found out"
    may_write.set()
    group.wait_until_whole()
    assert len(writes) == 1, "nobody asks for what the others would have written"
    assert watch.age_s(time.monotonic() + 1.0) == 0.0
    group.wait_until_idle()


def test_a_group_forms_again_after_its_stage_0_could_not_say_once_that_an_epoch_begins(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, failed = group.prefill.process.outbox, threading.Event()
    send = outbox.send

    def send_all_but_one(inbox: str, message: Any, *attached: Any) -> bool:
        if isinstance(message, GroupBegins) and not failed.is_set():
            failed.set()
            raise OSError("too many open files")
        return send(inbox, message, *attached)

    monkeypatch.setattr(outbox, "send", send_all_but_one)
    break_group(group)
    assert failed.wait(30.0)
    group.wait_until_whole()


def test_a_request_that_comes_while_the_group_breaks_goes_on_elsewhere(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = group.prefill.driver
    check, breaking = driver.check, threading.Thread(target=break_group, args=(group,))

    def check_and_break(job: Any) -> None:
        check(job)
        breaking.start()
        breaking.join(0.5)  # it ends at once unless the worker's lock is held

    with monkeypatch.context() as patch:
        patch.setattr(driver, "check", check_and_break)
        asked = group.ask([9] * 64, max_tokens=1)
    breaking.join()
    assert isinstance(asked.wait_failed(), WorkerGone)
    group.wait_until_idle()


def test_of_two_threads_that_say_where_a_stage_is_the_later_word_is_the_newer_one(
    group: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = group.stages[0]
    outbox, epoch, said = stage.process.outbox, stage._epoch, list[str]()
    send, is_slow = outbox.send, threading.Event()
    losing = threading.Thread(target=stage._lose_place)

    def send_slowly(inbox: str, message: Any, *attached: Any) -> bool:
        if not isinstance(message, StageBeat):
            return send(inbox, message, *attached)
        if not is_slow.is_set():
            is_slow.set()
            losing.start()
            losing.join(0.5)  # it ends at once unless it has to wait for this beat
        said.append(message.epoch)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "send", send_slowly)
        stage._beat()
        losing.join()
    assert said == [epoch] * said.count(epoch) + [""] * said.count("")
    assert epoch in said and "" in said
