"""Calls to prefill and decode workers, over their Tritons' gRPC endpoints: one stream per call.

A request and a reply each have two tensors: token ids, and a struct of workers/protocol.py as
bytes. Each worker has its own Triton (docs/decisions/0017), whose address is in the directory.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import grpc
import msgspec
import numpy as np
from grpc.experimental import ChannelOptions
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends import launch_secret, worker_tls
from backends.errors import ServingError, WorkerUnavailable, from_broken_call, from_wire
from backends.tensors import string_tensor
from backends.worker_tls import credentials_now, worker_channel
from backends.workers.protocol import (
    CALLS_VERSION,
    REPLY_BODY,
    REPLY_IDS,
    REQUEST_BODY,
    REQUEST_IDS,
    VERSION_PARAMETER,
    DecodeReply,
    DecodeRequest,
    PrefillReply,
    PrefillRequest,
    WorkerFailure,
    encode,
)
from conductor.messages import WorkerRef

LOOPBACK = "127."
CONNECTIONS = 4  # to each Triton, because Triton serves each HTTP/2 connection with one thread
PROBE_S_MAX = 2.0  # timeout of a probe
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels share one connection
    ("grpc.enable_http_proxy", 0),  # workers are on the cluster's network, never behind a proxy
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The thread that iterates over the responses also reads the connection. Without this option,
    # each call that begins on an idle connection starts a thread.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
]
OTHER_HOST_OPTIONS = [
    # Without keepalive pings, a call to a host behind a cut link would wait for minutes. The pings
    # detect the cut within 4 s, before the directory reports the worker gone (after 4.5 s or more).
    # The launcher configures the workers' Tritons to accept pings this often.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted worker keeps its address, so connections are tried again soon.
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also the timeout of an attempt to connect
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

# Calls a model: (address of its Triton, model, inputs, names of outputs, request id) -> one dict of
# flat arrays for each response.
Call = Callable[
    [str, str, Mapping[str, np.ndarray], list[str], str], Iterator[dict[str, np.ndarray]]
]
R = TypeVar("R", PrefillReply, DecodeReply)
_replies = msgspec.msgpack.Decoder(PrefillReply | DecodeReply | WorkerFailure)


class Connections:
    """Connections to one Triton, used in turn. The lock of GrpcCalls guards the fields."""

    def __init__(self, address: str) -> None:
        self.credentials = credentials_now()
        self._channels = [_channel(address) for _ in range(CONNECTIONS)]
        self.calls = itertools.cycle([_stream_of_one(each) for each in self._channels])
        self.in_use = 0  # calls under way

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class GrpcCalls:
    """The `Call` over gRPC, with its connections."""

    def __init__(self) -> None:
        self._connections: dict[str, Connections] = {}  # by the Triton's address
        self._retired: set[str] = set()  # addresses whose connections close after the last call
        self._replaced: list[Connections] = []  # have newer ones; each closes after its last call
        self._running: dict[str, grpc.Call] = {}  # open calls by request id
        self._lock = threading.Lock()
        self._secret = launch_secret.secret_of_launch()

    def __call__(
        self,
        address: str,
        model: str,
        inputs: Mapping[str, np.ndarray],
        outputs: list[str],
        request_id: str,
    ) -> Iterator[dict[str, np.ndarray]]:
        """One dict of flat arrays for each response. Raises ServingError, and its subclass
        WorkerUnavailable if the worker is lost.

        Closing the iterator early does not cancel the call, because Triton 2.51 never unloads a
        model after a cancelled call to it. Closing waits until the worker ends the stream, so the
        caller first sends the worker a Stop message, or calls `cancel` if the worker is gone.
        """
        request = _request(model, inputs, outputs, request_id)
        request.parameters[launch_secret.SECRET_PARAMETER].string_param = self._secret
        request.parameters[VERSION_PARAMETER].int64_param = CALLS_VERSION
        with self._connected(address) as begin:
            with self._lock:  # `cancel` must not run before a started call is in _running
                call = self._running[request_id] = begin(request)
            try:
                for response in call:
                    if response.error_message:
                        raise from_wire(response.error_message, model)
                    if response.infer_response.raw_output_contents:
                        yield _outputs(response.infer_response)
            except grpc.RpcError as error:
                raise _broken(address, model, error) from None
            finally:
                with contextlib.suppress(grpc.RpcError):
                    for _ in call:
                        pass
                with self._lock:
                    if self._running.get(request_id) is call:
                        del self._running[request_id]

    @contextlib.contextmanager
    def _connected(self, address: str) -> Iterator[grpc.UnaryStreamMultiCallable]:
        with self._lock:
            connections = self._connections.get(address)
            if connections is not None and connections.credentials is not credentials_now():
                self._replaced.append(connections)  # the host's certificate was renewed
                connections = None
            if connections is None:
                connections = self._connections[address] = Connections(address)
            connections.in_use += 1
            begin = next(connections.calls)
        try:
            yield begin
        finally:
            with self._lock:
                connections.in_use -= 1
            self._close_retired()

    def probe(self, address: str) -> None:
        """Check that the Triton at `address` answers. Raises a ServingError if it does not.

        After a success, calls use new connections, because a failed connection waits before it
        reconnects.
        """
        channel = _channel(address)
        try:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=PROBE_S_MAX)
        except grpc.RpcError as error:
            raise _broken(address, address, error) from None
        finally:
            channel.close()
        with self._lock:
            failed = self._connections.pop(address, None)
            self._retired.discard(address)
            self._replaced += [failed] if failed is not None else []
        self._close_retired()

    def keep(self, addresses: set[str]) -> None:
        """Close connections to all addresses except these, each after its last call."""
        with self._lock:
            self._retired = self._connections.keys() - addresses
        self._close_retired()

    def _close_retired(self) -> None:
        with self._lock:
            idle = [each for each in self._retired if not self._connections[each].in_use]
            self._retired.difference_update(idle)
            closing = [self._connections.pop(address) for address in idle]
            closing += [each for each in self._replaced if not each.in_use]
            self._replaced = [each for each in self._replaced if each.in_use]
        for connections in closing:
            connections.close()

    def cancel(self, request_id: str) -> None:
        """Cancel this request's open call. The thread that reads it gets WorkerUnavailable."""
        with self._lock:
            call = self._running.get(request_id)
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Close all connections. Threads that read open calls get WorkerUnavailable."""
        with self._lock:
            closing = [*self._connections.values(), *self._replaced]
            self._connections.clear()
            self._retired.clear()
        for connections in closing:
            connections.close()


def _channel(address: str) -> grpc.Channel:
    is_local = address.startswith(LOOPBACK)
    return worker_channel(address, OPTIONS if is_local else OPTIONS + OTHER_HOST_OPTIONS)


def _stream_of_one(channel: grpc.Channel) -> grpc.UnaryStreamMultiCallable:
    """ModelStreamInfer for calls with one request. On the wire it equals gRPC's generated stub. The
    stub is 0.5 ms slower per call, because it starts a thread that writes further requests."""
    return channel.unary_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )


def _broken(address: str, model: str, error: grpc.RpcError) -> ServingError:
    refused = worker_tls.refusal(address, error.details())
    return refused or from_broken_call(model, error.code(), error.details())


def _request(
    model: str, inputs: Mapping[str, np.ndarray], outputs: list[str], request_id: str
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        is_text = value.dtype == np.object_
        request.inputs.add(
            name=name, datatype="BYTES" if is_text else "INT32", shape=[1, value.size]
        )
        raw = _packed(value) if is_text else np.ascontiguousarray(value, np.int32).tobytes()
        request.raw_input_contents.append(raw)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def _packed(values: np.ndarray) -> bytes:
    """BYTES elements in KServe's format: for each element its length, then its bytes."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _outputs(response: service_pb2.ModelInferResponse) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            (length,) = struct.unpack_from("<I", raw)
            found[output.name] = np.array([raw[4 : 4 + length]], dtype=np.object_)
        else:
            found[output.name] = np.frombuffer(raw, np.int32)
    return found


def ask(
    call: Call,
    worker: WorkerRef,
    request: PrefillRequest | DecodeRequest,
    token_ids: np.ndarray,
    kind: type[R],
) -> tuple[np.ndarray, R]:
    """Call a worker. Returns (sampled token ids, rest of the reply). Raises ServingError."""
    inputs = {REQUEST_IDS: token_ids.astype(np.int32), REQUEST_BODY: string_tensor(encode(request))}
    outputs, reply = [REPLY_IDS, REPLY_BODY], None
    for answer in call(worker.grpc_address, worker.worker_id, inputs, outputs, request.request_id):
        body = _replies.decode(answer[REPLY_BODY][0])
        if isinstance(body, WorkerFailure):
            raise from_wire(body.message, worker.worker_id)
        assert isinstance(body, kind), f"{worker.worker_id} replied with {type(body).__name__}"
        reply = answer[REPLY_IDS], body
    if reply is None:
        raise WorkerUnavailable(f"{worker.worker_id} ended the call without a reply")
    return reply
