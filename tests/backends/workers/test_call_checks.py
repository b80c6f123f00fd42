"""A worker looks again at what its frontend has checked: one bad value would fail a whole batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.engine.sampling_params import SamplingParams
from backends.errors import InvalidRequest
from backends.workers.protocol import (
    CallLimits,
    DecodeRequest,
    PrefillRequest,
    decode_message,
    encode,
    inbox_address,
    inbox_prefixes,
)

INBOXES = "ipc:///tmp/launch/"
LIMITS = CallLimits(context_tokens_max=64, vocabulary_tokens=100, inboxes=(INBOXES,))
IDS = np.arange(10, dtype=np.int32)
PREFILL = PrefillRequest(
    "r1",
    10,
    SamplingParams(max_tokens=8),
    "",
    0,
    f"{INBOXES}decode_0-1",
    f"{INBOXES}conductor-1",
    18,
)
DECODE = DecodeRequest("r1", 9, SamplingParams(max_tokens=8), "", [], 0, f"{INBOXES}conductor-1")
NAN = math.nan


def sampling(**changes: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**{"max_tokens": 8, **changes})}


def reasons(request: Any, ids: np.ndarray = IDS, **changes: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        LIMITS.check(msgspec.structs.replace(request, **changes), ids)
    return str(refused.value)


@pytest.mark.parametrize("request_", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_what_a_frontend_sends_is_taken(request_: Any) -> None:
    LIMITS.check(request_, IDS)
    LIMITS.check(msgspec.structs.replace(request_, reply_inbox=""), IDS)


@pytest.mark.parametrize("request_", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (sampling(temperature=NAN), "temperature is nan"),
        (sampling(temperature=-1.0), "temperature is -1.0"),
        (sampling(top_k=-3), "top_k is -3"),
        (sampling(seed=-1), "seed is -1"),
        (sampling(repetition_penalty=0.0), "repetition_penalty is 0.0"),
        (sampling(min_tokens=1, end_ids=(100,)), "end id 100"),
        (sampling(max_tokens=0), "max_tokens is 0"),
        (sampling(max_tokens=60), "maximum context length is"),
        ({"prompt_tokens": 11}, "prompt_tokens is 11"),
        ({"prompt_tokens": -1}, "prompt_tokens is -1"),
        ({"request_id": ""}, "request_id has 0 characters"),
        ({"reply_inbox": "tcp://elsewhere:1"}, "not an inbox of this deployment"),
    ],
)
def test_values_that_an_engine_cannot_take_are_refused(
    request_: Any, changes: dict[str, Any], reason: str
) -> None:
    assert reason in reasons(request_, **changes)


@pytest.mark.parametrize("request_", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("ids", [[-1, 5], [5, 100], [5] * 65, []], ids=str)
def test_token_ids_outside_the_vocabulary_or_the_context_are_refused(
    request_: Any, ids: list[int]
) -> None:
    assert "input_ids" in reasons(request_, np.array(ids, np.int32), prompt_tokens=1)


def test_addresses_and_counts_of_a_prefill_are_checked() -> None:
    assert "not an inbox" in reasons(PREFILL, decode_inbox="ipc:///tmp/theirs/decode_0")
    assert "fetch_blocks is -1" in reasons(PREFILL, fetch_blocks=-1)
    assert "near_blocks is -1" in reasons(PREFILL, near_blocks=-1)
    assert "reserve_tokens is 65" in reasons(PREFILL, reserve_tokens=65)


def test_all_reasons_are_told_at_once() -> None:
    text = reasons(PREFILL, np.array([100], np.int32), prompt_tokens=5, **sampling(top_p=0.0))
    for part in ("input_ids must be 0 to 99", "prompt_tokens is 5", "top_p is 0.0"):
        assert part in text


def test_a_call_keeps_its_values_over_the_wire() -> None:
    LIMITS.check(msgspec.msgpack.decode(encode(PREFILL), type=PrefillRequest), IDS)
    with pytest.raises(msgspec.MsgspecError):
        decode_message(encode(PREFILL))


def test_inboxes_of_the_deployment_s_hosts_are_taken_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_SOCKETS", "/tmp/launch")
    assert inbox_prefixes() == ("ipc:///tmp/launch/",)
    assert inbox_address("decode_0-1") == "ipc:///tmp/launch/decode_0-1"
    assert inbox_address(f"{'w' * 100}-123abc") == "ipc:///tmp/launch/123abc", "a path is short"
    monkeypatch.setenv("MOONCAKE_ADDRESS", "10.77.0.1")
    monkeypatch.setenv("MOONCAKE_PEERS", "10.77.0.1,10.77.0.2")
    limits = replace(LIMITS, inboxes=inbox_prefixes())
    assert inbox_address("decode_0-1") == "tcp://10.77.0.1:0"
    ours = {"decode_inbox": "tcp://10.77.0.2:40001", "reply_inbox": "tcp://10.77.0.1:40002"}
    limits.check(msgspec.structs.replace(PREFILL, **ours), IDS)
    for foreign in ("tcp://10.77.0.21:40001", "tcp://10.77.0.3:1", "ipc:///tmp/launch/decode_0-1"):
        with pytest.raises(InvalidRequest, match="not an inbox of this deployment"):
            limits.check(msgspec.structs.replace(PREFILL, **{**ours, "decode_inbox": foreign}), IDS)
