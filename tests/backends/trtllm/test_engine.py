"""The engine as a whole, over the stand-in: it starts, or says why not, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.engine.connected import host_memory
from backends.engine.connected.channel import ConnectorHost
from backends.engine.connected.generation import Order
from backends.engine.connected.measuring import Stopwatch, measured_decode, measured_prefill
from backends.engine.connected.messages import ENVIRONMENT
from backends.engine.sampling_params import SamplingParams
from backends.engine.trtllm.engine import TrtllmEngine
from backends.engine.trtllm.settings import TrtllmConfig
from backends.errors import ConfigError, InvalidRequest
from backends.tensors import AFTER_THINKING, GRAMMAR, REGEX, STRUCTURAL_TAG
from tests.backends.small_tokenizers import DEMO
from tests.backends.trtllm.specs import decode_spec, prefill_spec


class Deaf:
    """A worker that does not listen."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None: ...
    def loaded(self, request_id: str) -> None: ...
    def saved(self, request_id: str, tokens: int) -> None: ...

    def broken(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets and the staging pool of this test; what the engine sets is taken back."""
    sockets = tmp_path / "s"
    sockets.mkdir()
    monkeypatch.setenv("MOONCAKE_SOCKETS", str(sockets))
    monkeypatch.setenv(ENVIRONMENT, "")
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(host_memory, "SHM", shm)
    before = set(threading.enumerate())
    yield shm
    assert not list(shm.iterdir()), "a staging pool stayed"
    assert not {each.name for each in set(threading.enumerate()) - before if each.name == "llm"}


def engine(
    worker: Any, config: TrtllmConfig, listener: Deaf | None = None, folder: Path = DEMO
) -> TrtllmEngine:
    return TrtllmEngine(
        "w", worker, config, folder, "model_repository", listener or Deaf(), lambda stats: None
    )


def test_it_starts_with_pages_of_the_promised_size(fake_package: None, places: Path) -> None:
    made = engine(prefill_spec(kv_pages=32), TrtllmConfig(tp_size=2))
    assert len(made.kv_pool) == 32 * made.layout.block_bytes
    assert made.tp_shape == "tensorrt_llm-1.4.0rc2-tp2-page32-float32"
    assert [path.stat().st_size for path in places.iterdir()] == [len(made.kv_pool)]
    watch = Stopwatch()
    sampling = made.sampling(SamplingParams(max_tokens=3), 0, 3)
    made.generate(Order([1, 2, 3], sampling), watch)
    watch.wait()
    assert len(watch.token_s) == 3
    assert measured_prefill(made, 0.0) and made.hardware.startswith("tensorrt_llm 1.4")
    made.close()
    made.close()  # twice is once


@pytest.mark.parametrize("tp_size", [1, 2])
def test_with_latent_attention_a_block_is_the_pages_of_one_rank(
    fake_package: None, tmp_path: Path, tp_size: int
) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "latent")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 32}
    (folder / "config.json").write_text(json.dumps(config | {"qk_rope_head_dim": 8}))
    made = engine(prefill_spec(kv_pages=32), TrtllmConfig(tp_size=tp_size), folder=folder)
    layout = made.layout
    assert (layout.kv_factor, layout.kv_heads, layout.head_dim) == (1, 1, 40)
    assert layout.block_bytes == layout.layers * layout.block_tokens * 40 * 4
    watch = Stopwatch()
    made.generate(Order([1, 2, 3], made.sampling(SamplingParams(max_tokens=3), 0, 3)), watch)
    watch.wait()
    assert len(watch.token_s) == 3
    made.close()


def test_kv_in_fp8_has_one_byte_a_number_and_is_another_engine_s(fake_package: None) -> None:
    plain = engine(prefill_spec(kv_pages=4), TrtllmConfig())
    made = engine(prefill_spec(kv_pages=4, kv_dtype="fp8"), TrtllmConfig())
    assert made.layout.dtype == "fp8" and "float32" in made.tp_shape
    assert made.layout.block_bytes * 4 == plain.layout.block_bytes
    watch = Stopwatch()
    made.generate(Order([1, 2, 3], made.sampling(SamplingParams(max_tokens=3), 0, 3)), watch)
    watch.wait()
    plain.close()
    made.close()


def test_a_decode_engine_that_hands_over_natively_has_no_pool_to_speak_of(
    fake_package: None,
) -> None:
    made = engine(decode_spec(kv_pages=32), TrtllmConfig(handoff="native"))
    assert len(made.kv_pool) == made.layout.block_bytes
    assert measured_decode(made, 0.0)
    made.close()


def test_a_schema_is_translated_where_its_grammar_sees_the_whole_answer(fake_package: None) -> None:
    guided = SamplingParams(max_tokens=3, end_ids=(1,), guide='{"type": "null"}')
    with_backend = '{"guided_decoding_backend": "xgrammar"}'
    made = engine(
        prefill_spec(kv_pages=4), TrtllmConfig(handoff="native", llm_options=with_backend)
    )
    assert made.sampling(guided, 0, 1).guided_decoding.json == '{"type": "null"}'
    for kind, keyword in ((REGEX, "regex"), (GRAMMAR, "grammar")):
        of_kind = made.sampling(replace(guided, guide_kind=kind), 0, 1).guided_decoding
        assert getattr(of_kind, keyword) == guided.guide and of_kind.json is None
    tagged = made.sampling(replace(guided, guide_kind=STRUCTURAL_TAG), 0, 1)
    assert tagged.guided_decoding is None, "calls of strict functions are not forced"
    with pytest.raises(InvalidRequest, match="turn the thinking off"):
        made.sampling(replace(guided, guide_kind=AFTER_THINKING), 0, 1)
    with pytest.raises(InvalidRequest, match="cannot go on with an answer that was begun"):
        made.sampling(guided, 2, 1)
    made.close()
    for config, words in (
        (TrtllmConfig(handoff="native"), "needs guided_decoding_backend in llm_options"),
        (TrtllmConfig(llm_options=with_backend), "needs handoff native"),
    ):
        made = engine(prefill_spec(kv_pages=4), config)
        assert made.sampling(SamplingParams(max_tokens=3), 0, 1).guided_decoding is None
        with pytest.raises(InvalidRequest, match=words):
            made.sampling(guided, 0, 1)
        with pytest.raises(InvalidRequest, match="logit_bias is not supported by workers with"):
            made.sampling(SamplingParams(max_tokens=3, logit_bias=((1, 1.0),)), 0, 1)
        with pytest.raises(InvalidRequest, match="say no logprobs"):
            made.sampling(SamplingParams(max_tokens=3, top_logprobs=0), 0, 1)
        with pytest.raises(InvalidRequest, match=r"^prompt_logprobs is not supported by"):
            made.sampling(SamplingParams(max_tokens=3, prompt_logprobs=0), 0, 1)
        made.close()


def test_speed_is_measured_within_the_context_that_the_engine_was_given(fake_package: None) -> None:
    prefill = engine(prefill_spec(kv_pages=64, context_tokens_max=1024), TrtllmConfig())
    assert max(new + before for new, before, _ in measured_prefill(prefill, 0.0)) < 1024
    prefill.close()
    decode = engine(decode_spec(kv_pages=64, context_tokens_max=512), TrtllmConfig())
    assert measured_decode(decode, 0.0)
    decode.close()


def test_a_context_that_is_too_long_is_said_before_the_llm_is_built(
    fake_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.engine.trtllm.engine.LlmThread", None)
    for pages, said in ((64, "allows 8192"), (2, "the pages of kv_bytes hold 128")):
        config = prefill_spec(kv_pages=pages, context_tokens_max=8193)
        with pytest.raises(ConfigError, match=f"context_tokens_max is 8193.*{said}"):
            engine(config, TrtllmConfig())


def test_an_llm_that_does_not_shut_down_leaves_neither_pool_nor_thread(
    fake_package: None, monkeypatch: pytest.MonkeyPatch, places: Path
) -> None:
    made = engine(prefill_spec(kv_pages=4), TrtllmConfig())
    assert list(places.iterdir())
    llm = made.llm._llm
    shutdown = llm.shutdown

    def fails() -> None:
        shutdown()
        raise ValueError("an error of the background")

    monkeypatch.setattr(llm, "shutdown", fails)
    made.close()


def test_everything_that_is_wrong_is_said_before_anything_is_started(tmp_path: Path) -> None:
    options = '{"pipeline_parallel_size": 2, "dtype": "auto"}'
    with pytest.raises(ConfigError) as caught:
        TrtllmEngine(
            "w",
            prefill_spec(),
            TrtllmConfig(llm_options=options),
            tmp_path,
            "model_repository",
            Deaf(),
            lambda stats: None,
        )
    said = str(caught.value)
    for word in ("not installed", "pipeline_parallel_size", "said by dtype", "config.json is mis"):
        assert word in said, said


def test_pages_of_another_size_than_promised_are_refused_with_both_numbers(
    fake_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorrt_llm.llmapi import llm  # type: ignore[import-not-found]

    shape_of = llm.shape_of

    def quantised(args: Any) -> Any:
        shape = shape_of(args)
        return type(shape)(**{**shape.__dict__, "dtype": "bfloat16"})

    monkeypatch.setattr(llm, "shape_of", quantised)
    with pytest.raises(ConfigError, match=r"\d+") as caught:
        engine(prefill_spec(kv_pages=4), TrtllmConfig())
    assert "bytes" in str(caught.value) and "is KV kept in another dtype" in str(caught.value)


def test_an_engine_that_cannot_be_built_says_why(
    fake_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorrt_llm.llmapi import llm

    def no_memory(args: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(llm, "shape_of", no_memory)
    with pytest.raises(ConfigError, match="did not start: RuntimeError: CUDA out of memory"):
        engine(prefill_spec(kv_pages=4), TrtllmConfig())


def test_leftovers_of_mpi_are_gone_when_the_engine_starts(
    fake_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    engine(prefill_spec(kv_pages=4), TrtllmConfig()).close()
    assert "OMPI_COMM_WORLD_RANK" not in os.environ


@pytest.mark.slow
def test_a_worker_on_torch_loads_nothing_of_tensorrt_llm() -> None:
    script = (
        "import sys; from backends.triton import worker_kinds as kinds;"
        "configs = kinds.read_worker_configs('prefill', 'prefill_0', {}, 1);"
        "kinds.make_driver('prefill', 'prefill_0', '.', *configs);"
        "print([m for m in sys.modules if 'tensorrt_llm' in m or '.trtllm.' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['backends.engine.trtllm.settings']"


def test_fewer_pages_on_the_gpu_than_promised_are_told_or_refused(
    fake_package: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait_ready, pages = ConnectorHost.wait_ready, [0]

    def less(host: ConnectorHost, timeout_s: float) -> list[Any]:
        ranks = wait_ready(host, timeout_s)
        return [msgspec.structs.replace(rank, gpu_pages=pages[0]) for rank in ranks]

    monkeypatch.setattr(ConnectorHost, "wait_ready", less)
    config = TrtllmConfig()
    worker = prefill_spec(kv_pages=32, context_tokens_max=64)
    promised = 32 * worker.block_tokens
    pages[0] = promised // config.page_tokens
    engine(worker, config).close()
    assert "promises" not in caplog.text
    pages[0] -= 1
    engine(worker, config).close()
    there = promised - config.page_tokens
    assert f"pages for {there} tokens on its device, kv_bytes promises {promised}" in caplog.text
    pages[0] = 1
    with pytest.raises(ConfigError, match=f"for {config.page_tokens} tokens.* may have 64"):
        engine(worker, config)


def test_another_rope_or_attention_backend_is_another_engine_s_kv(
    fake_package: None, tmp_path: Path
) -> None:
    def described(folder: Path, options: str = "") -> tuple[str, str]:
        made = TrtllmEngine(
            "w",
            prefill_spec(kv_pages=4),
            TrtllmConfig(llm_options=options),
            folder,
            "model_repository",
            Deaf(),
            lambda stats: None,
        )
        made.close()
        return made.weights_id, made.tp_shape

    copy = tmp_path / "copy"
    shutil.copytree(DEMO, copy)
    before = described(DEMO)
    assert described(copy) == before
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"rope_theta": 123.0}))
    assert described(copy) != before
    assert described(DEMO, '{"env_overrides": {"A": "1"}}') != before
