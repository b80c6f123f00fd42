"""Translation between requests, tensors, responses and errors; no server is needed."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from loadtest.client.protocol import (
    GenerateRequest,
    Rejected,
    ServerError,
    TokenEvent,
    json_body,
    parse_json,
    parse_response,
    server_error,
    tensors,
)


def test_a_request_sends_only_what_was_set_with_the_models_names_and_types() -> None:
    request = GenerateRequest(
        "r",
        input_ids=np.array([5, 6, 7]),
        max_tokens=4,
        min_tokens=4,
        end_id=-1,
        seed=2**63,
        temperature=0.5,
    )
    found = {name: (datatype, array.tolist()) for name, datatype, array in tensors(request)}
    assert found == {
        "input_ids": ("INT32", [[5, 6, 7]]),
        "max_tokens": ("INT32", [[4]]),
        "min_tokens": ("INT32", [[4]]),
        "end_id": ("INT32", [[-1]]),
        "stream": ("BOOL", [[True]]),
        "temperature": ("FP32", [[0.5]]),
        "seed": ("UINT64", [[2**63]]),
    }


def test_text_is_sent_as_utf8_bytes() -> None:
    (name, datatype, array), _ = tensors(GenerateRequest("r", text_input="Grüße"))
    assert (name, datatype, array.shape) == ("text_input", "BYTES", (1, 1))
    assert array[0, 0] == "Grüße".encode()


def test_ids_and_text_together_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="not both"):
        tensors(GenerateRequest("r", input_ids=np.array([1]), text_input="a"))


def response(**outputs: object) -> service_pb2.ModelInferResponse:
    made = service_pb2.ModelInferResponse(model_name="conductor", id="r")
    for name, value in outputs.items():
        if isinstance(value, str):
            raw = value.encode()
            made.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
            made.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
        else:
            array = np.array([value], dtype=np.int32)
            made.outputs.add(name=name, datatype="INT32", shape=array.shape)
            made.raw_output_contents.append(array.tobytes())
    return made


def test_a_response_becomes_an_event_with_its_time() -> None:
    decision = {"prefill_worker": "prefill_0", "cached_tokens": 64}
    event = parse_response(
        response(
            output_ids=[1, 70_000],
            text_output="né",
            finish_reason="length",
            cached_tokens=[64],
            num_input_tokens=[100],
            num_output_tokens=[2],
            decision=json.dumps(decision),
        ),
        time_s=1.5,
    )
    assert event == TokenEvent(1.5, (1, 70_000), "né", "length", 64, 100, decision)


def test_what_a_response_does_not_carry_is_empty() -> None:
    assert parse_response(response(output_ids=[3], finish_reason=""), 1.0) == TokenEvent(1.0, (3,))


@pytest.mark.parametrize("before", ["", "in ensemble 'ensemble', "])
def test_a_rejection_carries_its_reason_and_when_to_retry(before: str) -> None:
    error = server_error(f"{before}rejected kind=ttft retry_after_s=2.5: predicted TTFT 4.1 s")
    assert isinstance(error, Rejected)
    assert (error.kind, error.retry_after_s) == ("ttft", 2.5)
    assert error.message == "predicted TTFT 4.1 s"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("invalid_request: max_tokens is 0", "invalid_request"),
        ("in ensemble 'e', unavailable: no prefill worker is alive", "unavailable"),
        ("Request for unknown model: 'conductor' is not found", "server_error"),
        ("rejected kind=ttft retry_after_s=1.2.3: unreadable", "server_error"),
    ],
)
def test_other_errors_are_told_by_their_prefix(message: str, kind: str) -> None:
    error = server_error(message)
    assert type(error) is ServerError
    assert (error.kind, error.message) == (kind, message)


def test_over_http_a_request_is_the_same_tensors_as_json_without_its_id() -> None:
    request = GenerateRequest(
        "r",
        input_ids=np.array([5, 6, 7]),
        max_tokens=4,
        return_decision=True,
        priority=-1,
        parameters={"tenant": "a"},
    )
    assert json.loads(json_body(request)) == {
        "input_ids": [5, 6, 7],
        "max_tokens": 4,
        "stream": True,
        "return_decision": True,
        "request_priority": -1,
        "tenant": "a",
    }
    assert json.loads(json_body(GenerateRequest("r", text_input="Grüße")))["text_input"] == "Grüße"


def test_an_http_event_says_the_same_as_a_grpc_response() -> None:
    outputs = {
        "output_ids": [1, 70_000],
        "text_output": "né",
        "finish_reason": "length",
        "cached_tokens": 64,
        "num_input_tokens": 100,
        "decision": json.dumps({"prefill": "p0"}),
    }
    same = outputs | {"cached_tokens": [64], "num_input_tokens": [100]}
    assert parse_json(outputs, 1.5) == parse_response(response(**same), 1.5)


def test_an_http_event_with_a_single_token_carries_a_bare_number() -> None:
    assert parse_json({"output_ids": 7, "decision": ""}, 1.0) == TokenEvent(1.0, (7,))


def test_an_error_event_over_http_is_raised() -> None:
    with pytest.raises(Rejected, match="predicted TTFT") as raised:
        parse_json({"error": "rejected kind=ttft retry_after_s=2.5: predicted TTFT 4 s"}, 1.0)
    assert raised.value.retry_after_s == 2.5
