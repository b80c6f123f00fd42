"""Prompts reach TensorRT-LLM in the order in which they were staged, whatever loaders do."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from backends.engine.trtllm.messages import Stage
from backends.workers.kv_writer import BlockPut
from backends.workers.trtllm.prefill_job import TrtllmPrefillJob
from backends.workers.trtllm.prefill_worker import TrtllmPrefillWorker
from tests.backends.engine.trtllm.listening import WAIT_S


class SlowToHear:
    """The connector knows A's stage at once, its loader hears of it late: after B's, if it may."""

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

    def start(self, *given: Any) -> None: ...


def job_of(request_id: str) -> TrtllmPrefillJob:
    put = BlockPut(request_id, 7, pages=[0], keys=[], first_block=0)
    request: Any = SimpleNamespace(request_id=request_id, cache_salt="")
    return TrtllmPrefillJob(request, np.arange(7), None, put, 0.0)  # type: ignore[arg-type]


def test_equal_prompts_are_submitted_in_the_order_of_their_stages() -> None:
    worker: Any = TrtllmPrefillWorker.__new__(TrtllmPrefillWorker)
    slow = worker._staged = worker._engine = worker._batching = SlowToHear()
    worker._trtllm = SimpleNamespace(page_tokens=4)
    worker.worker = SimpleNamespace(fingerprint="print")
    worker._block_tokens, worker._lock = 8, threading.Condition()
    worker._staging = threading.Lock()
    worker._order = lambda job: job
    worker._jobs = {name: job_of(name) for name in "ab"}
    first = threading.Thread(target=worker._loaded, args=[worker._jobs["a"]])
    first.start()
    assert slow.is_a_staged.wait(WAIT_S)
    worker._loaded(worker._jobs["b"])
    first.join(WAIT_S)
    assert slow.order == ["stage a", "submit a", "stage b", "submit b"]
