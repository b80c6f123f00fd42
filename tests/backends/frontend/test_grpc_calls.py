"""Calls to workers, each at the Triton that serves it, over real gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends.errors import WorkerGone, WorkerRefused, WorkerUnavailable, WorkerUnreached
from backends.frontend import grpc_calls
from backends.frontend.grpc_calls import CONNECTIONS, GrpcCalls
from mooncake_store.keys.authority import Authority
from mooncake_store.keys.folder import VARIABLE, Keys


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with its own number; a request called "slow" waits until `go`."""

    def __init__(
        self,
        number: int,
        address: str = "127.0.0.1:0",
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.number = number
        self.begun, self.go = threading.Event(), threading.Event()
        self.server = grpc.server(ThreadPoolExecutor(4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        if credentials is None:
            port = self.server.add_insecure_port(address)
        else:
            port = self.server.add_secure_port(address, credentials)
        self.address = f"127.0.0.1:{port}"
        self.server.start()

    def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

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


def test_a_probe_says_what_a_call_would_meet_and_calls_behind_it_connect_anew(
    tritons: list[FakeTriton],
) -> None:
    calls, (triton, _) = GrpcCalls(), tritons
    address = triton.address
    assert ask(calls, triton) == 1
    triton.server.stop(None).wait()
    for _ in range(CONNECTIONS):
        with pytest.raises(WorkerUnreached):
            ask(calls, triton)
    with pytest.raises(WorkerUnreached, match=address):
        calls.probe(address)
    waiting = calls._connections[address]
    tritons[0] = again = FakeTriton(3, address)
    calls.probe(address)
    assert waiting not in calls._connections.values() and not calls._replaced
    assert ask(calls, again) == 3
    calls.close()


def test_a_triton_that_does_not_believe_us_refuses_and_one_that_dies_does_not(
    tritons: list[FakeTriton], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cluster in ("ours", "other"):
        (tmp_path / cluster).mkdir()
        Authority.begun(tmp_path / cluster).add_host("a")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ours" / "a"))
    theirs = Keys(tmp_path / "other" / "a")
    chain = [(theirs.private_key.read_bytes(), theirs.certificate.read_bytes())]
    strange = FakeTriton(
        4, credentials=grpc.ssl_server_credentials(chain, theirs.authorities.read_bytes(), True)
    )
    tritons.append(strange)
    calls = GrpcCalls()
    for _ in range(CONNECTIONS + 1):
        with pytest.raises(WorkerRefused, match="mooncake keys check"):
            ask(calls, strange)
    with pytest.raises(WorkerRefused):
        calls.probe(strange.address)
    monkeypatch.delenv(VARIABLE)
    dying = tritons[0]
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(ask, calls, dying, "slow")
        assert dying.begun.wait(30.0)
        dying.server.stop(0)
        with pytest.raises(WorkerUnavailable) as died:
            pending.result(30.0)
    assert not isinstance(died.value, WorkerGone), "the request may have been its end"
    calls.close()


def test_a_triton_that_does_not_listen_is_unavailable(tritons: list[FakeTriton]) -> None:
    calls, gone = GrpcCalls(), tritons[0]
    gone.server.stop(None).wait()
    with pytest.raises(WorkerUnavailable, match="decode_0"):
        ask(calls, gone)
    calls.close()


def test_a_cancel_while_a_call_begins_is_not_lost(
    tritons: list[FakeTriton], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, make = GrpcCalls(), grpc_calls._stream_of_one

    def begin_of(channel: grpc.Channel):
        def begin(request):
            call = make(channel)(request)
            cancelling = threading.Thread(target=calls.cancel, args=("slow",))
            cancelling.start()
            cancelling.join(0.2)
            return call

        return begin

    monkeypatch.setattr(grpc_calls, "_stream_of_one", begin_of)
    with pytest.raises(WorkerUnavailable):
        list(calls(tritons[0].address, "worker", {}, ["number"], "slow"))
    calls.close()
