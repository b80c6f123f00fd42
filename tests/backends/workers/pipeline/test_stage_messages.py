"""Steps of a pipeline group on the wire: plan and hidden states arrive as they were sent."""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest

from backends.engine.sampling_params import SamplingParams
from backends.workers.protocol import (
    ArrivedStep,
    SampleInputs,
    StageBeat,
    StageStep,
    StageWork,
    StageWritten,
    attached,
    decode_message,
    encode,
    open_inbox,
    open_outbox,
)
from mooncake_store.records.blocks import GENERATION_MAX, Slot

WAIT_S = 30.0


def a_step() -> StageStep:
    last = SampleInputs(
        sampling=SamplingParams(max_tokens=3, stop_words=("end",), end_ids=(2,), seed=2**64 - 1),
        prompt_ids=np.arange(40, dtype=np.int32).tobytes(),
        output_ids=b"",
    )
    work = StageWork(
        request_id="r",
        start=16,
        tokens=24,
        pages=[3, 1, 2],
        kv_tokens=40,
        reserve_tokens=48,
        decode_inbox="ipc://decode",
        slots=[(1, Slot("s0", 7, GENERATION_MAX, 5)), (2, Slot("s1", 8, 1))],
        last=last,
    )
    return StageStep("epoch", 4, [work])


def test_a_step_arrives_with_its_hidden_states_and_other_messages_in_their_order(
    tmp_path: Path,
) -> None:
    came: queue.SimpleQueue[object] = queue.SimpleQueue()
    inbox = open_inbox(f"ipc://{tmp_path}/i", lambda messages: [*map(came.put, messages)] and None)
    outbox, step = open_outbox(), a_step()
    hidden = np.random.default_rng(1).integers(0, 255, 3 * 2**20, dtype=np.uint8)
    beat = StageBeat("epoch", 1, "one")
    assert outbox.send(inbox.address, step, hidden.data)
    assert outbox.send(inbox.address, beat)
    arrived = came.get(timeout=WAIT_S)
    assert isinstance(arrived, ArrivedStep)
    assert arrived.step == step
    np.testing.assert_array_equal(np.frombuffer(arrived.hidden, np.uint8), hidden)
    assert came.get(timeout=WAIT_S) == beat
    inbox.close()
    outbox.close()


def test_the_largest_digest_comes_back_as_it_was() -> None:
    written = StageWritten("epoch", 1, 4, [{3: {11: 2**64 - 1}}, {}], ["", "it failed"])
    assert decode_message(encode(written)) == written


def test_a_message_that_has_no_attachment_takes_none() -> None:
    with pytest.raises(ValueError, match="StageBeat has no attachment"):
        attached(StageBeat("epoch", 1, "one"), memoryview(b"bytes"))
