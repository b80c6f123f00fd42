"""Prompts reach TensorRT-LLM in the order in which they were staged, whatever loaders do."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from backends.engine.connected.messages import Stage
from backends.workers.connected.prefill import ConnectedPrefill
from backends.workers.jobs import PrefillJob
from backends.workers.kv_writer import BlockPut
from tests.backends.engine.connected.listening import WAIT_S
from tests.backends.trtllm.test_unmatched_stages import InPool


class SlowToHear:
    """The connector knows A's stage at once, its loader hears of it late: after B's, if it may."""

    handover_tokens = 4

    def __init__(self) -> None:
        self.order: list[str] = []
        self.is_a_staged = threading.Event()
        self.is_b_submitted = threading.Event()

    def stage(self, stage: Stage) -> None:
        self.order.append(f"stage {stage.request_id}")
        if stage.request_id == "a":
            self.is_a_staged.set()
            self.is_b_submitted.wait(0.3)

    def generate(self, job: Any, sink: Any) -> None:
        self.order.append(f"submit {job.request_id}")
        if job.request_id == "b":
            self.is_b_submitted.set()


def job_of(request_id: str) -> PrefillJob:
    put = BlockPut(request_id, 7, pages=[0], keys=[], first_block=0)
    request: Any = SimpleNamespace(request_id=request_id, cache_salt="")
    return PrefillJob(
        request=request,
        client=None,
        submitted_s=0.0,
        token_ids=np.arange(7),
        put=put,  # type: ignore[arg-type]
    )


def test_equal_prompts_are_submitted_in_the_order_of_their_stages() -> None:
    driver: Any = object.__new__(ConnectedPrefill)
    slow = driver._staged = driver.engine = SlowToHear()
    driver._block_tokens = 8
    driver._prompts, driver._staging, driver._placed = {}, threading.Lock(), InPool()
    driver._regions = None
    driver._worker = SimpleNamespace(
        process=SimpleNamespace(fingerprint="print"),
        lock=threading.Condition(),
        post=lambda job, event: None,
    )
    driver._order = lambda job: job
    first = threading.Thread(target=driver.start, args=[job_of("a")])
    first.start()
    assert slow.is_a_staged.wait(WAIT_S)
    driver.start(job_of("b"))
    first.join(WAIT_S)
    assert slow.order == ["stage a", "submit a", "stage b", "submit b"]
