"""The stand-in executor calls a connector as often, and with what, as TensorRT-LLM's own tests say.

Numbers are for N generated tokens. With the overlap scheduler there is one iteration more, in which
1.2.x computes a token too many and newer versions nothing. A connector that only notes calls is
asked; ours runs through the same cases in test_connector.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.backends.engine.trtllm.test_fake_executor import generate, make_executor, prompts_of

pytestmark = pytest.mark.usefixtures("trtllm")
RECORDING = "tests.backends.engine.trtllm.recording"
N, PAGE = 6, 4


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def is_overlapping(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def executors() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for executor in made:
        executor.shutdown()


def run(executors: list[Any], prompt_tokens: int, options: dict[str, Any], **answers: Any) -> Any:
    """One request through the recording connector; its notes."""
    from tensorrt_llm.llmapi.llm_args import KvCacheConnectorConfig

    plan = importlib.import_module(RECORDING).start_again(**answers)
    config = KvCacheConnectorConfig(
        RECORDING, "MooncakeConnectorScheduler", "MooncakeConnectorWorker"
    )
    executor = make_executor(kv_connector_config=config, **options)
    executors.append(executor)
    (output,) = generate(executor, prompts_of([prompt_tokens]), N)
    assert len(output) == N
    assert executor.blocks.free_blocks == executor.blocks.blocks
    return plan


@pytest.fixture(autouse=True)
def fresh_recording(trtllm: str) -> Iterator[None]:
    """Its base classes are those of the API at hand."""
    sys.modules.pop(RECORDING, None)
    yield
    sys.modules.pop(RECORDING, None)


def test_a_request_without_hits(is_overlapping: bool, executors: list[Any], trtllm: str) -> None:
    plan = run(executors, 14, {"disable_overlap_scheduler": not is_overlapping})
    iterations = N + int(is_overlapping and trtllm == "1.2")
    assert plan.count("get_finished") == N + int(is_overlapping)
    assert plan.count("register_kv_caches") == 1
    scalars = 2 * PAGE * 8 * (4 if trtllm == "1.4" else 1)  # V2 describes bytes, of float32 here
    assert plan.of("register_kv_caches")[0][1:] == (3, 2, scalars)
    assert plan.count("get_num_new_matched_tokens") == 1
    assert [len(ids) for ids in plan.of("update_state_after_alloc")] == [-(-14 // PAGE)]
    for name in ("build_connector_meta", "start_load_kv", "wait_for_save"):
        assert plan.count(name) == iterations, name
    for name in ("wait_for_layer_load", "save_kv_layer"):
        assert plan.of(name) == [0, 1, 2] * iterations
    assert plan.count("request_finished") == 1

    first, *rest = plan.of("build_connector_meta")
    ((new,), cached) = first.new_requests, first.cached_requests
    assert (len(new.new_tokens), new.computed_position, new.num_scheduled_tokens) == (14, 0, 14)
    assert len(new.new_block_ids) == 4 and cached == []
    assert all(len(output.cached_requests) == 1 and not output.new_requests for output in rest)
    grew = [len(output.cached_requests[0].new_tokens) for output in rest]
    assert grew == ([0] if is_overlapping else [1]) + [1] * (iterations - 2)


def test_an_asynchronous_load(is_overlapping: bool, executors: list[Any]) -> None:
    plan = run(executors, 14, {"disable_overlap_scheduler": not is_overlapping}, matched=(8, True))
    polls = plan.of("get_finished")
    assert len(polls) == N + 1 + int(is_overlapping)
    assert len(polls[0][1]) == 1 and all(not loading for _, loading in polls[1:])
    assert plan.count("get_num_new_matched_tokens") == plan.count("update_state_after_alloc") == 1
    assert plan.of("build_connector_meta")[0].new_requests == []
    ((new,), _) = (plan.of("build_connector_meta")[1].new_requests, None)
    assert (new.computed_position, len(new.new_tokens)) == (8, 14)


def test_a_synchronous_load_is_not_in_the_position(executors: list[Any]) -> None:
    plan = run(executors, 14, {"disable_overlap_scheduler": True}, matched=(8, False))
    (new,) = plan.of("build_connector_meta")[0].new_requests
    assert (new.computed_position, new.num_scheduled_tokens) == (0, 6)


def test_an_asynchronous_save(is_overlapping: bool, executors: list[Any]) -> None:
    plan = run(executors, 14, {"disable_overlap_scheduler": not is_overlapping}, is_saving=True)
    polls = plan.of("get_finished")
    assert len(polls) == N + int(is_overlapping)
    assert [len(finished) for finished, _ in polls] == [0] * (len(polls) - 1) + [1]


def test_a_prompt_in_two_chunks(is_overlapping: bool, executors: list[Any], trtllm: str) -> None:
    plan = run(
        executors,
        256,
        {
            "disable_overlap_scheduler": not is_overlapping,
            "enable_chunked_prefill": True,
            "max_num_tokens": 128,
        },
    )
    outputs = plan.of("build_connector_meta")
    (first,), (second,) = outputs[0].new_requests, outputs[1].cached_requests
    assert (first.computed_position, second.computed_position) == (0, 128)
    assert (len(first.new_tokens), len(second.new_tokens)) == (256, 0)
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == (128, 128)
    pages = (32, 32) if trtllm == "1.4" else (64, 0)  # V2 gives them chunk by chunk
    assert (len(first.new_block_ids), len(second.new_block_ids)) == pages
    assert len(outputs) == N + 1 + int(is_overlapping and trtllm == "1.2")


def test_a_context_only_request(executors: list[Any]) -> None:
    from tensorrt_llm._fake.request import LlmRequest
    from tensorrt_llm.llmapi.llm_args import KvCacheConnectorConfig

    plan = importlib.import_module(RECORDING).start_again()
    config = KvCacheConnectorConfig(
        RECORDING, "MooncakeConnectorScheduler", "MooncakeConnectorWorker"
    )
    executor = make_executor(kv_connector_config=config, disable_overlap_scheduler=True)
    executors.append(executor)
    request = LlmRequest(1, prompts_of([14])[0], 8, kind="context_only")
    executor.submit(request)
    executor.run_until_idle()
    assert plan.count("build_connector_meta") == plan.count("request_finished") == 1
    with pytest.raises(RuntimeError, match="not supported for generation-only"):
        executor.submit(LlmRequest(2, [1], 1, kind="generation_only"))


def test_it_refuses_an_asynchronous_load_of_nothing(executors: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=r"\(0, True\)"):
        run(executors, 14, {}, matched=(0, True))
