"""Clients that others wrote get what they read: TensorRT-LLM's and genai-perf's requests, curl.

The tensors are those that NVIDIA's `end_to_end_grpc_client.py` and genai-perf send: the same names,
types, shapes [1, 1], requested outputs (perf_analyzer asks for all), and the same way to read the
answer. aiperf and genai-perf themselves run here where `make clients` has installed them; that
takes a minute each.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from bench.clients import aiperf, curl, genai_perf, tensorrt_llm
from bench.clients.agreement import ClientLoad
from bench.clients.replay import ScaledTrace
from bench.clients.tensorrt_llm import OUTPUTS, TimedResponse, text_of
from loadtest.harness.server import PROJECT
from tests.e2e.public_clients import installed
from tests.e2e.server import Server, wait_until

MODELS = ["conductor", "ensemble"]
PROMPT = "It is a truth universally acknowledged"
TOKENS = 12


def request(stream: bool, **more: Any) -> dict[str, Any]:
    return tensorrt_llm.request(PROMPT, TOKENS, stream) | more


def answers(
    server: Server, model: str, inputs: dict[str, Any], *outputs: str
) -> list[TimedResponse]:
    with triton.InferenceServerClient(server.addresses.grpc) as client:
        return tensorrt_llm.send(client, model, inputs, outputs or OUTPUTS)


@pytest.mark.parametrize("model", MODELS)
def test_tensorrt_llms_client_gets_a_text_streamed_and_whole(demo: Server, model: str) -> None:
    whole, streamed = (answers(demo, model, request(stream)) for stream in (False, True))
    assert len(whole) == 1 and len(streamed) > 1
    assert text_of(whole).startswith(PROMPT), "the prompt was not excluded"
    assert text_of(streamed) == text_of(whole)[len(PROMPT) :], "never streamed, as by TensorRT-LLM"


@pytest.mark.parametrize("model", MODELS)
def test_tensorrt_llms_client_may_send_everything_it_knows(demo: Server, model: str) -> None:
    inputs = request(
        True,
        num_return_sequences=np.array([[1]], np.int32),
        stop_words=np.array([["\n\n\n"]], object),
        repetition_penalty=np.array([[1.0]], np.float32),
        presence_penalty=np.array([[0.0]], np.float32),
        frequency_penalty=np.array([[0.0]], np.float32),
        end_id=np.array([[0]], np.int32),
        pad_id=np.array([[0]], np.int32),
    )
    indices = ("sequence_index", "batch_index")
    arrivals = answers(demo, model, inputs, *OUTPUTS, *indices)
    assert text_of(arrivals) == text_of(answers(demo, model, request(True)))
    found = {arrival.result.as_numpy(name)[0][0] for arrival in arrivals for name in indices}
    assert found == {0}, "read as [0][0]: these two keep the batch dimension"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", genai_perf.BACKENDS)
def test_genai_perf_gets_as_many_tokens_as_it_asks_for(
    demo: Server, model: str, backend: str
) -> None:
    sent = {
        "text_input": np.array([[PROMPT]], object),
        "exclude_input_in_output": np.array([[True]], bool),
        "stream": np.array([[True]], bool),
    }
    lengths = {
        "tensorrtllm": {
            "max_tokens": np.array([[TOKENS]], np.int32),
            "min_length": np.array([[TOKENS]], np.int32),
        },
        "vllm": {
            "sampling_parameters": np.array(
                [[json.dumps({"max_tokens": str(TOKENS), "min_tokens": str(TOKENS)})]], object
            )
        },
    }
    with triton.InferenceServerClient(demo.addresses.grpc) as client:
        every = [output.name for output in client.get_model_metadata(model).outputs]
        arrivals = tensorrt_llm.send(client, model, sent | lengths[backend], every, True)
    tokens = [int(arrival.result.as_numpy("num_output_tokens")[0][0]) for arrival in arrivals]
    assert sum(tokens) == TOKENS  # on a busy machine some share a message


@pytest.mark.parametrize("model", MODELS)
def test_perf_analyzer_finds_the_statistics_and_the_configuration_it_needs(
    demo: Server, model: str
) -> None:
    def successes() -> int:
        found = client.get_inference_statistics(model).model_stats[0]
        return int(found.inference_stats.success.count)

    with triton.InferenceServerClient(demo.addresses.grpc) as client:
        assert client.get_model_config(model).config.model_transaction_policy.decoupled
        before = successes()
        answers(demo, model, request(True))
        wait_until(lambda: successes() > before, "the request to be counted")


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on the PATH")
@pytest.mark.parametrize("call", curl.CALLS, ids=lambda call: call.title)
def test_curl_gets_what_it_asks_for(demo: Server, call: curl.CurlCall) -> None:
    answer = curl.send(call, f"http://{demo.addresses.http}")
    assert answer.status in call.statuses and call.body is not None
    if call.body.get("max_tokens") == 0:
        assert json.loads(answer.text)["error"].startswith("invalid_request: max_tokens is 0")
        return
    lines = answer.text.split("\n\n") if call.body.get("stream") else [f"data: {answer.text}"]
    messages = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert call.body.get("stream") or len(messages) == 1
    assert sum(m["num_output_tokens"] for m in messages) == call.body.get("max_tokens", 8)
    assert "".join(m["text_output"] for m in messages) and messages[-1]["finish_reason"] == "length"


def small_load(server: Server) -> ClientLoad:
    return ClientLoad(server.addresses, PROJECT / "backends" / "demo_checkpoint", 4, 2, 64, 8)


def test_aiperf_replays_a_trace_when_it_is_installed(demo: Server, tmp_path: Path) -> None:
    binaries = installed(aiperf.NAME)
    turns = PROJECT / "tests" / "data" / "conversation_turns.jsonl"
    trace = ScaledTrace(turns, 0.1, 1_000.0, requests_max=4)
    report = aiperf.run(binaries, small_load(demo), "conductor", tmp_path / "out", trace)
    assert report.requests == 4 and report.ttft_ms_mean > 0
    assert "Time to First Token" in report.table


def test_genai_perf_runs_when_it_is_installed(demo: Server, tmp_path: Path) -> None:
    binaries = installed(genai_perf.NAME)
    load, out = small_load(demo), tmp_path / "out"
    report = genai_perf.run(binaries, load, "ensemble", "tensorrtllm", out)
    assert report.requests == 4 and report.ttft_ms_mean > 0
    assert "Time To First Token" in report.table
