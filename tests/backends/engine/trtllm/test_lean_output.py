"""A step is described to our connector without reading every token of every request again."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from backends.engine.trtllm import connector
from tests.backends.engine.connected.connected import Make, expected, prompt_of

pytestmark = pytest.mark.usefixtures("trtllm")
PROMPT, TOKENS = prompt_of(100), 40


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often all tokens, or all pages, of a request were read."""
    from tensorrt_llm._fake.connectors import Pages  # type: ignore[import-not-found]
    from tensorrt_llm._fake.request import LlmRequest  # type: ignore[import-not-found]

    counted: Counter[str] = Counter()

    def count(cls: Any, name: str) -> None:
        method = getattr(cls, name)

        def counting(*given: Any) -> Any:
            counted[name] += 1
            return method(*given)

        monkeypatch.setattr(cls, name, counting)

    count(LlmRequest, "get_tokens")
    count(Pages, "get_cache_indices")
    return counted


@pytest.mark.parametrize("is_overlapping", [False, True])
@pytest.mark.parametrize("chunk", [8192, 24])
def test_a_step_reads_what_is_new(
    make: Make, reads: Counter[str], is_overlapping: bool, chunk: int
) -> None:
    engine = make(
        disable_overlap_scheduler=not is_overlapping,
        enable_chunked_prefill=True,
        max_num_tokens=chunk,
    )
    pages = engine.stage("a", PROMPT, more_tokens=TOKENS)
    request = engine.generate(1, PROMPT, TOKENS)
    assert engine.output(request) == expected(engine, PROMPT, TOKENS)
    engine.heard.wait_for("saved", "a", 136)  # 139 tokens have KV, in pages of 4
    engine.unstage("a", pages)
    assert reads["get_tokens"] == 1, "to find the stage; steps need no tokens"
    new_pages = TOKENS // engine.shape.tokens_per_block
    assert reads["get_cache_indices"] <= new_pages + 8, "once for each page, not for each step"


def test_an_ended_request_is_forgotten(make: Make) -> None:
    engine = make()
    for number in range(5):
        engine.generate(number, PROMPT, 3)
    assert not engine.executor.connectors._output.requests


def test_ranks_that_ask_no_scheduler_describe_nothing(
    make: Make, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = make().executor.connectors._output
    (api,) = [
        module
        for name, module in sys.modules.items()
        if name.endswith(".kv_cache_connector") and hasattr(module, "mpi_rank")
    ]
    monkeypatch.setattr(api, "mpi_rank", lambda: 1)
    request = SimpleNamespace(request_id=1)
    assert output.build_scheduler_output([request], {}, None).new_requests == []
    assert not output.requests and not reads


def test_an_api_that_looks_otherwise_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert connector.install(ModuleType("empty")) is False

    class Other:
        def update_and_build_data(self, request: Any) -> None: ...
        def build_scheduler_output(self, batch: Any) -> None: ...

    api: Any = ModuleType("other")
    for name in connector.NEEDED:
        setattr(api, name, Other)
    assert connector.install(api) is False
    assert getattr(api, connector.REQUEST) is Other and "is not as known" in caplog.text
