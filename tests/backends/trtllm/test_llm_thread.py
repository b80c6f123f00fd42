"""Generations over the stand-in's LLM: tokens come, aborts end, nothing is left behind."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from backends.engine.connected.generation import Order, Outcome
from backends.engine.sampling_params import GOLDEN, SamplingParams
from backends.engine.trtllm import llm_thread, package
from backends.engine.trtllm.llm_thread import LlmThread
from backends.engine.trtllm.package import PackageProblem, llm_arguments
from backends.engine.trtllm.sampling import Sampler, llm_sampling
from backends.engine.trtllm.settings import OBJECTS, TrtllmConfig
from backends.engine.trtllm.stats import IterationStats
from backends.errors import InvalidRequest, WorkerUnavailable
from tests.backends.small_tokenizers import DEMO
from tests.backends.trtllm.specs import decode_spec, prefill_spec

PROMPT = [20 + 7 * n % 1900 for n in range(100)]
DEADLINE_S = 20.0
CXX = Sampler("1.2.1", "TRTLLMSampler")


class Heard:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.outcome: queue.Queue[Outcome] = queue.Queue()
        self.began = threading.Event()

    def tokens(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.began.set()

    def ended(self, outcome: Outcome) -> None:
        self.outcome.put(outcome)

    def end(self) -> Outcome:
        return self.outcome.get(timeout=DEADLINE_S)


class Engines:
    """LLMs without a connector, as the native hand-over's decode side has one."""

    def __init__(self) -> None:
        self.package = package.load()
        self.stats: queue.Queue[IterationStats] = queue.Queue()
        config = TrtllmConfig(handoff="native")
        arguments = llm_arguments(self.package, decode_spec(), config, DEMO, 4096, {}, "float32")
        self.llm = LlmThread(lambda: self.package.top.LLM(**arguments), self.stats.put)

    def sampling(self, tokens: int, **changes: Any) -> Any:
        params = SamplingParams(max_tokens=tokens, **changes)
        return llm_sampling(self.package.top.SamplingParams, CXX, params, 0, tokens, 0)

    def ask(self, tokens: int, **order: Any) -> Heard:
        heard = Heard()
        self.llm.generate(Order(PROMPT, self.sampling(tokens), **order), heard)
        return heard


@pytest.fixture
def engines(fake_package: None) -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.llm.close(2.0)


def test_streamed_and_whole_answers_have_the_same_tokens(engines: Engines) -> None:
    streamed, whole = engines.ask(12), engines.ask(12, is_streaming=False)
    assert streamed.end() == whole.end() == Outcome("length")
    assert streamed.token_ids == whole.token_ids and len(whole.token_ids) == 12


def test_an_aborted_generation_ends_as_cancelled_and_its_neighbour_goes_on(
    engines: Engines,
) -> None:
    heard, neighbour = Heard(), engines.ask(300)
    running = engines.llm.generate(Order(PROMPT, engines.sampling(3000)), heard)
    assert heard.began.wait(DEADLINE_S)
    running.abort()
    assert heard.end().finish_reason == "cancelled"
    running.abort()  # too late, and harmless
    assert neighbour.end().finish_reason == "length" and len(neighbour.token_ids) == 300


def test_one_that_is_aborted_before_it_began_does_not_begin(engines: Engines) -> None:
    release, heard = threading.Event(), Heard()
    engines.llm._loop.call_soon_threadsafe(release.wait)
    engines.llm.generate(Order(PROMPT, engines.sampling(5)), heard).abort()
    release.set()
    assert heard.end().finish_reason == "cancelled"


def test_a_request_that_the_engine_refuses_fails_alone(engines: Engines) -> None:
    assert isinstance(engines.ask(100_000).end().error, InvalidRequest)
    assert engines.ask(3).end() == Outcome("length")


def test_statistics_arrive_by_themselves(engines: Engines) -> None:
    engines.ask(3).end()
    stats = engines.stats.get(timeout=DEADLINE_S)
    values = {(name, *labels.values()): value for name, labels, value in stats.series()}
    assert values["nv_trt_llm_kv_cache_block_metrics", "tokens_per"] == 32
    assert values["nv_trt_llm_request_metrics", "max"] == 32
    assert stats.step_s > 0


def test_closing_ends_what_runs_and_leaves_no_thread(fake_package: None) -> None:
    before = set(threading.enumerate())
    engines = Engines()
    heard = engines.ask(3500)
    assert heard.began.wait(DEADLINE_S)
    engines.llm.close(0.0)
    assert heard.end().finish_reason == "cancelled"
    assert not [each.name for each in set(threading.enumerate()) - before if not each.daemon]
    assert "llm" not in {each.name for each in set(threading.enumerate()) - before}
    with pytest.raises(WorkerUnavailable):
        engines.llm.generate(Order(PROMPT, engines.sampling(1)), Heard())


def test_what_the_llm_cannot_be_built_with_is_raised_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    def build() -> Any:
        raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        LlmThread(build, lambda stats: None)
    assert "llm" not in {each.name for each in set(threading.enumerate()) - before}


def test_kv_that_the_engines_hand_over_themselves_gives_the_same_tokens(engines: Engines) -> None:
    alone = engines.ask(10)
    alone.end()
    cls = engines.package.named("DisaggregatedParams")
    context = engines.ask(1, is_streaming=False, native_params=llm_thread.for_prefill(cls, "r1"))
    state = context.end().native
    assert context.token_ids == alone.token_ids[:1] and state
    second = Engines()
    try:
        rest = second.ask(10, native_params=llm_thread.for_decode(cls, state))
        assert rest.end().finish_reason == "length"
        assert rest.token_ids == alone.token_ids[1:]
    finally:
        second.llm.close(2.0)


def test_sampling_says_what_was_asked_for_and_nothing_else(fake_package: None) -> None:
    cls = package.load().top.SamplingParams
    params = SamplingParams(max_tokens=9, end_ids=(5,), temperature=0.0)
    greedy = llm_sampling(cls, CXX, params, 1, 8, 20)
    assert (greedy.max_tokens, greedy.end_id, greedy.top_k, greedy.seed) == (8, 5, 1, None)
    drawn = SamplingParams(
        max_tokens=9,
        end_ids=(5, 6),
        temperature=0.5,
        top_k=3,
        seed=7,
        min_tokens=4,
        presence_penalty=1.0,
    )
    first = llm_sampling(cls, CXX, drawn, 0, 1, 20)
    later = llm_sampling(cls, CXX, drawn, 1, 8, 20)
    assert (first.seed, later.seed) == (7, (7 + GOLDEN) % 2**64)
    assert (first.min_tokens, later.min_tokens) == (1, 3)
    assert later.stop_token_ids == [6] and later.presence_penalty == 1.0 and later.top_k == 3
    assert later.prompt_ignore_length == 20, "what prefill drew counts as output"
    assert greedy.prompt_ignore_length is None
    assert llm_sampling(cls, CXX, SamplingParams(max_tokens=1), 0, 1, 20).ignore_eos


def test_sampling_that_a_release_lacks_is_refused_not_ignored() -> None:
    def old(
        max_tokens: int,
        end_id: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        return "made"

    llm_sampling(old, CXX, SamplingParams(max_tokens=1, end_ids=(1,), temperature=1.0), 0, 1, 1)
    with pytest.raises(InvalidRequest, match="min_p"):
        params = SamplingParams(max_tokens=1, end_ids=(1,), temperature=1.0, min_p=0.1)
        llm_sampling(old, CXX, params, 0, 1, 1)


def test_prefill_and_decode_engines_are_set_up_for_their_work(fake_package: None) -> None:
    loaded, store = package.load(), TrtllmConfig(page_tokens=16)
    options = {"kv_cache_config": {"event_buffer_max_size": 16}, "load_format": "dummy"}
    prefill = llm_arguments(loaded, prefill_spec(), store, DEMO, 4096, options, "float32")
    assert prefill["max_num_tokens"] == 512 and prefill["cuda_graph_config"] is None
    assert prefill["disable_overlap_scheduler"] and prefill["load_format"] == "dummy"
    cache = prefill["kv_cache_config"]
    assert (cache.tokens_per_block, cache.enable_partial_reuse) == (16, False)
    room = 256 * 64 + prefill["max_batch_size"] * 16
    assert (cache.max_tokens, cache.event_buffer_max_size) == (room, 16)
    decode = llm_arguments(loaded, decode_spec(slots=8), store, DEMO, 4096, {}, "float32")
    assert decode["max_batch_size"] == 8 and "cuda_graph_config" not in decode
    assert decode["kv_connector_config"] == prefill["kv_connector_config"]
    native = TrtllmConfig(handoff="native")
    assert "kv_connector_config" not in llm_arguments(
        loaded, decode_spec(), native, DEMO, 1, {}, "float32"
    )
    assert "kv_connector_config" in llm_arguments(
        loaded, prefill_spec(), native, DEMO, 1, {}, "float32"
    )


def test_an_option_that_the_release_does_not_know_is_named(fake_package: None) -> None:
    with pytest.raises(PackageProblem, match="does not know warp_drive"):
        llm_arguments(
            package.load(), prefill_spec(), TrtllmConfig(), DEMO, 1, {"warp_drive": 9}, "float32"
        )


@pytest.mark.parametrize("name", OBJECTS)
def test_an_unknown_key_inside_an_option_is_named_too(fake_package: None, name: str) -> None:
    with pytest.raises(PackageProblem, match=rf"does not know {name}\.dtyp, {name}\.wrap"):
        llm_arguments(
            package.load(),
            prefill_spec(),
            TrtllmConfig(),
            DEMO,
            1,
            {name: {"wrap": 1, "dtyp": "fp8"}},
            "float32",
        )


def test_without_the_package_the_reason_says_where_it_lives() -> None:
    assert not package.is_installed(), "these tests run without it"
    with pytest.raises(PackageProblem, match=r"not on PyPI.*Dockerfile\.trtllm"):
        package.load()


def test_an_engine_whose_processes_failed_is_not_healthy(engines: Engines) -> None:
    assert engines.llm.is_healthy
    engines.llm._llm._executor.error = RuntimeError("CUDA error")
    until_s = time.monotonic() + DEADLINE_S
    while engines.llm.is_healthy:
        assert time.monotonic() < until_s
        time.sleep(0.02)  # poll


def test_a_dtype_that_is_not_the_checkpoint_s_reaches_the_engine(fake_package: None) -> None:
    loaded, config = package.load(), TrtllmConfig()
    worker = prefill_spec(dtype="bfloat16")
    options = {"model_kwargs": {"num_hidden_layers": 2}}

    def arguments(checkpoint_dtype: str, known: frozenset[str] | None) -> Any:
        made = dataclasses.replace(loaded, llm_fields=known)
        return llm_arguments(made, worker, config, DEMO, 4096, options, checkpoint_dtype)

    changed = arguments("float16", loaded.llm_fields)["model_kwargs"]
    dtypes = {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    assert changed == {"num_hidden_layers": 2, **dtypes}
    assert options == {"model_kwargs": {"num_hidden_layers": 2}}, "the operator's stay as they are"
    assert arguments("bfloat16", None)["model_kwargs"] == options["model_kwargs"]
    with pytest.raises(PackageProblem, match="dtype is bfloat16, the checkpoint computes in float"):
        arguments("float16", loaded.llm_fields - {"model_kwargs"})


def test_a_prompt_that_is_aborted_in_its_middle_leaves_no_page_that_was_not_computed(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases keep all pages of a cancelled prompt for reuse, computed or not."""
    from tensorrt_llm._fake.executor import Executor  # type: ignore[import-not-found]

    monkeypatch.setattr(Executor, "stores_uncomputed", True)
    prompt = [1 + 11 * n % 1900 for n in range(4000)]  # eight steps of 512

    def order(tokens: int) -> Order:
        return Order(prompt, engines.sampling(tokens))

    step, hasty = Executor.step, Heard()
    going: list[Any] = []

    def step_and_abort(executor: Any) -> None:
        executor.args.max_num_tokens = 512
        step(executor)
        if going and executor._active:
            going.pop().abort()
            heard_of = threading.Event()
            engines.llm._loop.call_soon_threadsafe(heard_of.set)
            assert heard_of.wait(DEADLINE_S), "the abort is in the engine, if it ever gets there"

    monkeypatch.setattr(Executor, "step", step_and_abort)
    engines.llm._loop.call_soon_threadsafe(
        lambda: going.append(engines.llm.generate(order(50), hasty))
    )
    assert hasty.end().finish_reason == "cancelled" and len(hasty.token_ids) < 50
    patient, alone, other = Heard(), Heard(), Engines()
    try:
        engines.llm.generate(order(5), patient)
        other.llm.generate(order(5), alone)
        assert patient.end() == alone.end() == Outcome("length")
        assert patient.token_ids == alone.token_ids, "pages were reused that nobody had computed"
    finally:
        other.llm.close(2.0)
