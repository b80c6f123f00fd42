"""A worker of TensorRT-LLM that hangs ends, also when what hangs holds its lock."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from backends.errors import WorkerUnavailable
from backends.workers.trtllm import decode_worker as trtllm_decode_worker
from backends.workers.trtllm import prefill_worker as trtllm_prefill_worker


@pytest.mark.parametrize(
    ("module", "name"),
    [(trtllm_prefill_worker, "TrtllmPrefillWorker"), (trtllm_decode_worker, "TrtllmDecodeWorker")],
)
def test_its_jobs_fail_and_its_process_ends(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(module, "end_process", lambda *steps: ended.append(steps))
    monkeypatch.setattr(module, "LOCK_S_MAX", 0.01)
    failed: list[Exception] = []
    worker = object.__new__(getattr(module, name))
    worker._is_closing = False
    worker._lock = threading.Condition()
    worker._jobs = {"r": SimpleNamespace(client=SimpleNamespace(fail=failed.append))}
    worker.worker = SimpleNamespace(deregister=None)
    worker._engine = SimpleNamespace(close=None)
    is_held, may_go = threading.Event(), threading.Event()

    def hang() -> None:
        with worker._lock:
            is_held.set()
            may_go.wait(60.0)

    thread = threading.Thread(target=hang)
    thread.start()
    assert is_held.wait(10.0)
    try:
        worker._lost("its step does not end")
    finally:
        may_go.set()
        thread.join()
    assert ended and [type(error) for error in failed] == [WorkerUnavailable]
