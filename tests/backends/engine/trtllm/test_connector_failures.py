"""Our connector when it fails itself: every rank raises, none waits; older executors leak nothing.

TensorRT-LLM calls the scheduler on rank 0 and broadcasts what it says: an exception before that
would leave the other ranks waiting (the stand-in says so: OtherRanksWait).
"""

from __future__ import annotations

from typing import Any

import pytest

from backends.engine.connected.rank_copies import RankCopies
from backends.engine.trtllm.scheduler import TrtllmScheduler
from tests.backends.engine.connected.connected import Make, expected, prompt_of

pytestmark = pytest.mark.usefixtures("trtllm")
PROMPT = prompt_of(40)


@pytest.mark.parametrize("method", ["match", "allocated", "orders", "finished"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_rank_0_raises_is_raised_on_all_ranks_and_said_to_the_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch, method: str, tp_size: int
) -> None:
    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    engine = make(tensor_parallel_size=tp_size)
    pages = engine.stage("a", PROMPT)
    engine.submit(1, PROMPT, 2)
    with monkeypatch.context() as patch:
        patch.setattr(TrtllmScheduler, method, fails)
        if method == "finished":
            engine.executor.run_until_idle()  # nothing to raise in: the worker ends it
        else:
            with pytest.raises(RuntimeError, match=r"rank 0.*ZeroDivisionError.*a mistake of ours"):
                engine.executor.step()
    engine.heard.wait_until(lambda: any(each[0] == "broken" for each in engine.heard.all), "broken")
    engine.free_pages += pages


def test_requests_that_end_in_the_same_step_all_give_their_pages_back(make: Make) -> None:
    engine = make(max_batch_size=8)
    prompts = [prompt_of(30, seed) for seed in range(6)]
    staged = {str(i): engine.stage(str(i), prompt) for i, prompt in enumerate(prompts)}
    requests = [engine.submit(i, prompt, 3) for i, prompt in enumerate(prompts)]
    engine.executor.run_until_idle()
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert engine.output(request) == expected(engine, prompt, 3)
        engine.unstage(str(i), staged[str(i)])
    blocks = engine.executor.blocks
    assert blocks.free_blocks == blocks.blocks, "an executor that ends one save a step forgot some"


def test_a_rank_that_cannot_go_on_says_so_before_it_raises(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tensor_parallel_size=2)
    pages = engine.stage("a", PROMPT)
    engine.submit(1, PROMPT, 2)

    def fails(*arguments: Any) -> None:
        raise RuntimeError("KV was not copied within 60 s")

    monkeypatch.setattr(RankCopies, "start", fails)
    with pytest.raises(RuntimeError, match="not copied"):
        engine.executor.step()
    engine.heard.wait_for("broken", "rank 0: KV was not copied within 60 s")
    monkeypatch.undo()
    engine.free_pages += pages
