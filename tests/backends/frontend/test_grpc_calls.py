"""Calls to workers, each at the Triton that serves it, over real gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends.errors import WorkerUnavailable
from backends.frontend.grpc_calls import GrpcCalls


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with its own number; a request called "slow" waits until `go`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.begun, self.go = threading.Event(), threading.Event()
        self.server = grpc.server(ThreadPoolExecutor(4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def ModelStreamInfer(self, requests, context):
        for request in requests:
            if request.id == "slow":
                self.begun.set()
                self.go.wait(30.0)
            answer = service_pb2.ModelInferResponse(id=request.id)
            answer.outputs.add(name="number", datatype="INT32", shape=[1])
            answer.raw_output_contents.append(np.int32(self.number).tobytes())
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)


@pytest.fixture
def tritons() -> Iterator[list[FakeTriton]]:
    made = [FakeTriton(1), FakeTriton(2)]
    yield made
    for triton in made:
        triton.go.set()
        triton.server.stop(None)


def ask(calls: GrpcCalls, triton: FakeTriton, request_id: str = "it") -> int:
    inputs = {"input_ids": np.arange(3, dtype=np.int32)}
    answers = calls(triton.address, "decode_0", inputs, ["number"], request_id)
    (answer,) = list(answers)
    return int(answer["number"][0])


def test_a_call_goes_to_the_triton_of_its_worker(tritons: list[FakeTriton]) -> None:
    calls = GrpcCalls()
    assert [ask(calls, triton) for triton in (*tritons, *tritons)] == [1, 2, 1, 2]
    calls.close()


def test_connections_to_a_worker_that_left_are_closed(tritons: list[FakeTriton]) -> None:
    calls, (gone, stays) = GrpcCalls(), tritons
    assert [ask(calls, triton) for triton in tritons] == [1, 2]
    calls.keep({stays.address})
    assert calls._connections.keys() == {stays.address}
    assert ask(calls, gone) == 1, "it came back"
    assert calls._connections.keys() == {gone.address, stays.address}
    calls.close()


def test_a_call_that_runs_ends_before_its_connection_is_closed(tritons: list[FakeTriton]) -> None:
    calls, (draining, other) = GrpcCalls(), tritons
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(ask, calls, draining, "slow")
        assert draining.begun.wait(30.0)
        calls.keep({other.address})
        assert calls._connections.keys() == {draining.address}
        draining.go.set()
        assert pending.result(30.0) == 1
    assert not calls._connections
    calls.close()


def test_a_call_to_a_worker_that_is_gone_can_be_cancelled(tritons: list[FakeTriton]) -> None:
    calls, silent = GrpcCalls(), tritons[0]
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(ask, calls, silent, "slow")
        assert silent.begun.wait(30.0)
        calls.cancel("slow")
        with pytest.raises(WorkerUnavailable):
            pending.result(30.0)
    calls.close()


def test_a_triton_that_does_not_listen_is_unavailable(tritons: list[FakeTriton]) -> None:
    calls, gone = GrpcCalls(), tritons[0]
    gone.server.stop(None).wait()
    with pytest.raises(WorkerUnavailable, match="decode_0"):
        ask(calls, gone)
    calls.close()
