"""tritonclient with the requests of NVIDIA's clients of TensorRT-LLM's ensemble.

Names, types, shapes [1, 1] and requested outputs are those of `end_to_end_grpc_client.py`
(tensorrtllm_backend 0.19); so is one stream for each request, closed by `stop_stream`. The
end-to-end test sends the same. Not here: our own client (loadtest/client/triton_client.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from bench.clients.agreement import ClientLoad, ClientReport, one_after_another
from bench.clients.environment import ClientFailed

NAME = "tritonclient"
OUTPUTS = ("text_output",)
Inputs = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TimedResponse:
    time_s: float
    result: triton.InferResult


def request(prompt: str, max_tokens: int, stream: bool) -> dict[str, npt.NDArray[Any]]:
    """That client's request for a prompt and a length without other options."""
    return {
        "text_input": np.array([[prompt]], object),
        "max_tokens": np.array([[max_tokens]], np.int32),
        "stream": np.array([[stream]], bool),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[1.0]], np.float32),
        "exclude_input_in_output": np.array([[False]], bool),
    }


def send(
    client: triton.InferenceServerClient,
    model: str,
    inputs: Inputs,
    outputs: Sequence[str] = OUTPUTS,
    wants_empty_final: bool = False,
) -> list[TimedResponse]:
    """Every response of one stream, in order; raises ClientFailed."""
    tensors = []
    for name, array in inputs.items():
        tensors.append(triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    arrivals: list[TimedResponse] = []
    errors: list[Exception] = []

    def take(result: triton.InferResult, error: Exception | None) -> None:
        if error is not None:
            errors.append(error)
        elif result.get_response().outputs:  # the last response may be empty
            arrivals.append(TimedResponse(time.perf_counter(), result))

    client.start_stream(take)
    client.async_stream_infer(
        model,
        tensors,
        outputs=[triton.InferRequestedOutput(name) for name in outputs],
        enable_empty_final_response=wants_empty_final,
    )
    client.stop_stream()  # waits for the last response
    if errors or not arrivals:
        raise ClientFailed(f"{model} answered {errors[0] if errors else 'nothing'}")
    return arrivals


def text_of(arrivals: Sequence[TimedResponse]) -> str:
    """The text as that client reads it: the tensor has one dimension."""
    return "".join(each.result.as_numpy("text_output")[0].decode("utf-8") for each in arrivals)


def run(load: ClientLoad, model: str) -> ClientReport:
    """Fresh prompts, streamed one after the other; raises ClientFailed."""
    with triton.InferenceServerClient(load.addresses.grpc) as client:

        def ttft_s(prompt: str) -> float:
            inputs = request(prompt, load.output_tokens, stream=True)
            sent_s = time.perf_counter()
            return send(client, model, inputs)[0].time_s - sent_s

        return one_after_another(NAME, load, model, ttft_s, "first message")
