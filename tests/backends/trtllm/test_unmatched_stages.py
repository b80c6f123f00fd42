"""A prompt that the connector did not recognise is computed, on both sides, instead of failing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.engine.trtllm.block_pages import SlotUse
from backends.workers.jobs import PrefillJob
from backends.workers.kv_writer import BlockPut
from backends.workers.protocol import BlockRef
from backends.workers.trtllm.decode import EngineAnswer, TrtllmDecode
from backends.workers.trtllm.prefill import UNCLAIMED_S_MAX, StagedPrompt, TrtllmPrefill

REF = BlockRef(0, "s0", 1, 1, 0)


class InPool:
    """No block lies in a slot."""

    def places(self, pages: list[int], whole: int) -> tuple[list[int], tuple[SlotUse, ...]]:
        return pages, ()


class Heard:
    """A driver over a worker that writes down what it hears."""

    def __init__(self) -> None:
        put = BlockPut("a", 40, pages=[0, 1, 2], keys=[b"0", b"1"], first_block=1)
        put.refs = {0: REF}
        request: Any = SimpleNamespace(request_id="a", cache_salt="tenant", decode_inbox="")
        self.job = PrefillJob(
            request=request,
            client=None,
            submitted_s=0.0,
            token_ids=np.arange(40),
            put=put,  # type: ignore[arg-type]
        )
        self.said: list[Any] = []
        said, job = self.said, self.job
        self.driver: Any = object.__new__(TrtllmPrefill)
        self.driver.is_native, self.driver._transfer_s_max = False, 60.0
        self.driver._step_began_s = self.driver._step_ended_s = 0.0
        self.driver._health = SimpleNamespace(went_well=lambda: said.append("well"))
        self.driver._worker = SimpleNamespace(
            lock=threading.Condition(), jobs={"a": job}, has_left=lambda job: False,
            settle_behind=lambda job, blocks: said.append("others may look again"),
            send_first_token=lambda job, token: said.append(("first", token, job.cached_tokens)),
            answer=lambda job, token: said.append((token, job.reply("me", 8).blocks)),
            batching=SimpleNamespace(computed=lambda chunks: None),
            process=SimpleNamespace(watch=SimpleNamespace(progressed=lambda now_s: None)),
        )  # fmt: skip
        self.prompt = StagedPrompt(self.driver, job, 40, range(1, 3))
        self.driver._prompts = {job: self.prompt}


def test_a_prompt_that_was_not_recognised_is_answered_without_blocks() -> None:
    heard = Heard()
    driver, prompt = heard.driver, heard.prompt
    prompt.token_id, prompt.ended_s = 7, 1.0  # computed, and the connector has said nothing of it
    assert driver._late(1.0 + UNCLAIMED_S_MAX / 2) == []
    assert driver._late(1.0 + UNCLAIMED_S_MAX * 2) == [prompt]
    driver._give_up([prompt])
    assert heard.said == ["others may look again", ("first", 7, 0), "well", (7, [])]
    assert driver._late(1e9) == [], "once"


def test_what_was_cached_is_known_before_anything_is_said() -> None:
    """The engine's token may come before the connector's word of what it did not compute."""
    heard = Heard()
    heard.job.cached_tokens, heard.prompt.unsaved = 39, range(0)
    heard.driver.computed(heard.prompt, 7)
    assert heard.said == []
    heard.driver.claimed("a", 8, 24)
    assert heard.said == [], "nobody said that what was loaded is what was verified"
    heard.driver.loaded("a")
    assert heard.said == [("first", 7, 32), "well", (7, [REF])]
    heard.driver.claimed("a", 0, 0)
    assert heard.job.cached_tokens == 32, "it was said"
    assert len(heard.said) == 3, "each once"


@pytest.mark.parametrize(("refs", "loaded"), [([], 0), ([REF], 28)])
def test_what_was_not_handed_over_is_staged_as_nothing_to_load(
    refs: list[BlockRef], loaded: int
) -> None:
    driver: Any = object.__new__(TrtllmDecode)
    staged: list[Any] = []
    driver._staged, driver._staged_jobs = SimpleNamespace(stage=staged.append), {}
    driver._placed = InPool()
    driver.config, driver._block_tokens = SimpleNamespace(page_tokens=4), 16
    driver._worker = SimpleNamespace(
        lock=threading.Condition(), process=SimpleNamespace(fingerprint="print")
    )
    request = SimpleNamespace(cache_salt="", blocks=refs)
    job: Any = SimpleNamespace(
        request_id="a", token_ids=list(range(31)), request=request, pages=[0, 1]
    )
    driver._stage(EngineAnswer(driver, job))
    assert [each.loaded_tokens for each in staged] == [loaded]
