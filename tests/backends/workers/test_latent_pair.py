"""A DeepSeek-V3-shaped model from prefill by the store to decode: the tokens of transformers.

With TensorRT-LLM, which is a stand-in here, those of the stand-in's model with such KV.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from backends.engine.connected import host_memory
from backends.engine.connected.messages import ENVIRONMENT
from tests.backends.engine.checkpoints import YARN_ROPE, load_reference, make_checkpoint
from tests.backends.engine.reference import Comparison, greedy
from tests.backends.small_tokenizers import DEMO
from tests.backends.trtllm.conftest import fake_package as fake_package  # a fixture
from tests.backends.workers.pair import pairs, prompt
from tests.backends.workers.test_preemption import LONG, PAGES, SHORT, long_and_short, preemptions
from tests.e2e.trtllm import expected

BLOCK, CHUNK, TOKENS = 64, 128, 8
LENGTHS = (5, CHUNK + 1, 300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(
        "deepseek_v3",
        tmp_path_factory.mktemp("deepseek_v3"),
        rope_parameters=YARN_ROPE,
        vocab_size=2048,
        num_hidden_layers=6,
        hidden_size=48,
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(Path(DEMO) / name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("layerwise", "stages"), [("true", 1), ("false", 1), ("false", 2)])
def test_tokens_through_the_store_are_those_of_transformers(
    layerwise: str, stages: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, comparison = load_reference(checkpoint), Comparison()
    with tempfile.TemporaryDirectory(prefix="mooncake-") as folder:
        for pair in pairs(
            Path(folder),
            monkeypatch,
            stages,
            checkpoint=str(checkpoint),
            chunk_tokens=str(CHUNK),
            layerwise=layerwise,
        ):
            if stages > 1:
                pair.wait_until_whole()
            assert pair.decode.driver.engine.layout.kv_factor == 1
            for length in LENGTHS:
                ids = prompt(length, length)
                right = greedy(model, ids, TOKENS)
                for cached in (0, (length - 1) // BLOCK * BLOCK):
                    asked = pair.ask(ids, max_tokens=TOKENS)
                    comparison.add(f"{length} tokens, {cached} cached", asked.wait(), right)
                    assert asked.prefill_reply is not None
                    assert asked.prefill_reply.cached_tokens >= cached
            pair.wait_until_idle()
    comparison.check(excluded_share_max=0.1)


@pytest.mark.slow
def test_a_preempted_request_goes_on_with_the_tokens_of_transformers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows go to the store and come back into other pages, in the middle of a block."""
    model, comparison = load_reference(checkpoint), Comparison()
    with tempfile.TemporaryDirectory(prefix="mooncake-") as folder:
        for pair in pairs(
            Path(folder), monkeypatch, kv_pages=str(PAGES), checkpoint=str(checkpoint)
        ):
            long, short = long_and_short(pair, monkeypatch)
            for name, asked, tokens in (("short", short, SHORT), ("long", long, LONG)):
                comparison.add(name, asked.wait(), greedy(model, asked.prompt, tokens))
            assert preemptions(pair) == 1
            pair.wait_until_idle()
    comparison.check(excluded_share_max=0.1)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_with_tensorrt_llm_a_block_has_the_latent_once_however_many_ranks_load_it(
    fake_package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "latent")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 32}
    (folder / "config.json").write_text(json.dumps(config | {"qk_rope_head_dim": 8}))
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(host_memory, "SHM", shm)
    monkeypatch.setenv(ENVIRONMENT, "")
    for pair in pairs(
        tmp_path,
        monkeypatch,
        engine="tensorrt_llm",
        page_tokens="32",
        handoff="store",
        tp_size=str(tp_size),
        checkpoint=str(folder),
    ):
        assert pair.decode.driver.engine.layout.block_bytes == 4 * BLOCK * 40 * 4
        for length in (1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
            ids = prompt(length, length)
            for cached in (0, (length - 1) // BLOCK * BLOCK):
                asked = pair.ask(ids, max_tokens=TOKENS)
                assert asked.wait() == expected(
                    ids, TOKENS, kv_factor=1, kv_heads=1, head_dim=40
                ), length
                assert asked.prefill_reply is not None
                assert asked.prefill_reply.cached_tokens >= cached
        pair.wait_until_idle()
