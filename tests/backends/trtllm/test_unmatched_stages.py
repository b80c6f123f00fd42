"""A prompt that the connector did not recognise is computed, on both sides, instead of failing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.errors import KvMissing
from backends.workers.kv_writer import BlockPut
from backends.workers.protocol import BlockRef, FirstToken
from backends.workers.trtllm.decode_worker import TrtllmDecodeWorker
from backends.workers.trtllm.prefill_job import TrtllmPrefillJob
from backends.workers.trtllm.prefill_worker import UNCLAIMED_S_MAX, TrtllmPrefillWorker

REF = BlockRef(0, "s0", 1, 1, 0)


def computed_job() -> TrtllmPrefillJob:
    """The engine has ended it; the connector has said nothing of it."""
    put = BlockPut("a", 40, pages=[0, 1, 2], keys=[b"0", b"1"], first_block=1)
    put.refs = {0: REF}
    request: Any = SimpleNamespace(request_id="a", cache_salt="tenant", decode_inbox="")
    job = TrtllmPrefillJob(request, np.arange(40), None, put, 0.0)  # type: ignore[arg-type]
    job.token_id, job.ended_s, job.unsaved = 7, 1.0, range(1, 3)
    return job


def test_a_prompt_that_was_not_recognised_is_answered_without_blocks() -> None:
    worker: Any = TrtllmPrefillWorker.__new__(TrtllmPrefillWorker)
    job, said = computed_job(), []
    worker._jobs, worker._lock, worker._is_native = {"a": job}, threading.RLock(), False
    worker._health = SimpleNamespace(went_well=lambda: said.append("well"))
    worker._writer = SimpleNamespace(then=lambda action: action())
    worker._settle = lambda job, keys: said.append("others may look again")
    worker._answer = lambda job, token: said.append((token, job.reply("me", 8).blocks))
    worker._config = SimpleNamespace(transfer_s_max=60.0)
    job.is_told = True
    assert worker._late(1.0 + UNCLAIMED_S_MAX / 2) == []
    (late,) = worker._late(1.0 + UNCLAIMED_S_MAX * 2)
    worker._hand_over_nothing(late)
    assert said == ["others may look again", "well", (7, [])]
    assert worker._late(1e9) == [], "once"


def test_what_was_cached_is_known_before_anything_is_told() -> None:
    """The engine's token may come before the connector's word of what it did not compute."""
    worker: Any = TrtllmPrefillWorker.__new__(TrtllmPrefillWorker)
    job, said = computed_job(), []
    job.unsaved, job.token_id, job.cached_tokens = range(0), None, 39
    job.request.sampling = SimpleNamespace(max_tokens=9, end_ids=(), stop_words=())
    job.request.prompt_tokens = len(job.token_ids)
    worker._jobs, worker._lock, worker._is_native = {"a": job}, threading.RLock(), False
    worker._lock = threading.Condition(worker._lock)
    worker._health = SimpleNamespace(went_well=lambda: None)
    worker._writer = SimpleNamespace(then=lambda action: action())
    worker._answer = lambda job, token: said.append(("reply", job.cached_tokens))
    worker._batching = SimpleNamespace(computed=lambda chunks: None)
    worker._step_began_s = worker._step_ended_s = 0.0
    worker.worker = SimpleNamespace(
        watch=SimpleNamespace(progressed=lambda now_s: None),
        outbox=SimpleNamespace(send=lambda inbox, letter: said.append(letter)),
    )
    job.request.reply_inbox = "front"
    worker.computed(job, 7)
    assert said == []
    worker.claimed("a", 8, 24)
    assert said == [FirstToken("a", 7, 32), ("reply", 32)]
    worker.claimed("a", 0, 0)
    assert job.cached_tokens == 32, "it was told"


def decoding(**config: Any) -> Any:
    worker: Any = TrtllmDecodeWorker.__new__(TrtllmDecodeWorker)
    worker._is_native = False
    worker._trtllm = SimpleNamespace(page_tokens=4)
    worker._config = SimpleNamespace(block_tokens=16)
    worker._lock = threading.Condition()
    worker._arrivals = SimpleNamespace(refuse=lambda request_id, now_s: None)
    return worker


def test_decode_takes_a_request_without_blocks_and_none_with_too_few() -> None:
    worker = decoding()
    for refs, is_good in (([], True), ([REF], False), ([REF, BlockRef(1, "s0", 2, 1, 0)], True)):
        request = SimpleNamespace(request_id="a", blocks=refs)
        with worker._lock:
            if is_good:
                worker._refuse_uncovered(request, 30)
            else:
                with pytest.raises(KvMissing):
                    worker._refuse_uncovered(request, 30)


@pytest.mark.parametrize(("refs", "loaded"), [([], 0), ([REF], 28)])
def test_what_was_not_handed_over_is_staged_as_nothing_to_load(
    refs: list[BlockRef], loaded: int
) -> None:
    worker, staged = decoding(), []
    worker._staged = SimpleNamespace(stage=staged.append)
    worker._staged_jobs, worker.worker = {}, SimpleNamespace(fingerprint="print")
    request = SimpleNamespace(cache_salt="", blocks=refs)
    job: Any = SimpleNamespace(
        request_id="a", token_ids=list(range(31)), request=request, pages=[0, 1]
    )
    worker._stage(job)
    assert [each.loaded_tokens for each in staged] == [loaded]
