"""gRPC between a frontend and the Triton of a worker, a client in front of a frontend.

A call is a connection of its own. A worker whose whole Triton dies resets it; one of which only
the stub process dies never ends it, as Triton 2.51 does; a cut delays it, or breaks it. What a
worker is asked and what it answers are the bytes of its protocol.

Not here: what is called when (backends/frontend/), what a worker does with it (backends/workers/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from backends.errors import ServingError, WorkerUnavailable, from_broken_call
from backends.tensors import string_tensor
from backends.workers.protocol import (
    REPLY_BODY,
    REPLY_IDS,
    REQUEST_BODY,
    REQUEST_IDS,
    DecodeReply,
    DecodeRequest,
    PrefillReply,
    PrefillRequest,
    WorkerFailure,
    encode,
)
from tests.fuzz_serve.green import Queue, in_process, loop, sleep, spawn
from tests.fuzz_serve.loop import Process
from tests.fuzz_serve.network import Network, Wire

CONNECT_S_MAX = 1.0
# As gRPC words them: the other end died, its link was cut, nobody was there.
RESET = "Stream removed (Socket closed)"
LINK_CUT = "Stream removed (recvmsg:Connection timed out (110))"
NEVER_SENT = "failed to connect to all addresses"
_decoders = {
    "prefill": msgspec.msgpack.Decoder(PrefillRequest).decode,
    "decode": msgspec.msgpack.Decoder(DecodeRequest).decode,
}


class Triton:
    """The gRPC port of one worker's Triton, which may outlive the worker."""

    def __init__(self, network: Network, process: Process, role: str) -> None:
        self.network, self.process = network, process
        self.parse: Callable[[bytes], Any] = _decoders[role]
        self.worker: Any = None  # once the model is loaded
        self.under_way: dict[int, Call] = {}
        self.is_reset = True  # False: only the stub died, its calls hang


class Call:
    """One stream, seen from both ends."""

    def __init__(self, triton: Triton, caller: Process) -> None:
        self.triton, self.caller = triton, caller
        network = triton.network
        self.out = Wire(network, caller.host, triton.process.host)
        self.back = Wire(network, triton.process.host, caller.host)
        self.answers = Queue()
        self.is_over = False

    def come_back(self, answer: Any) -> None:
        if self.caller.is_alive and not self.is_over:
            self.answers.put(answer)

    def lost(self, details: str) -> None:
        """Its connection breaks: the caller hears of it, sooner or later."""
        world = loop()
        delay_s = self.triton.network.delay_s(self.caller.host, self.triton.process.host)
        world.at(world.now_s + delay_s, self._break, details, self.caller)

    def _break(self, details: str) -> None:
        if not self.is_over:
            self.answers.put(from_broken_call("", "UNAVAILABLE", details))


class GreenReply:
    """In place of triton_io.WorkerReply: answers one call, once."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_answered = False

    def prefilled(self, token_id: int, reply: PrefillReply) -> None:
        self._send(np.array([token_id], np.int32), reply)

    def decoded(self, token_ids: list[int], reply: DecodeReply) -> None:
        self._send(np.array(token_ids, np.int32), reply)

    def fail(self, error: Exception) -> None:
        known = error if isinstance(error, ServingError) else WorkerUnavailable(repr(error))
        self._send(np.zeros(0, np.int32), WorkerFailure(known.wire_message()))

    def is_cancelled(self) -> bool:
        return False

    def _send(self, ids: np.ndarray, body: msgspec.Struct) -> None:
        assert not self._is_answered, "a call was answered twice"
        self._is_answered = True
        call = self._call
        call.triton.under_way.pop(id(call), None)
        if not call.triton.process.is_alive or loop().is_over:
            return
        answer = {REPLY_IDS: ids, REPLY_BODY: string_tensor(encode(body))}
        if not call.back.send(call.come_back, answer):
            call.lost(LINK_CUT)


class GreenCalls:
    """In place of grpc_calls.GrpcCalls, in one frontend."""

    tritons: dict[str, Triton]  # by address; set by the stage

    def __init__(self) -> None:
        self._running: dict[str, Call] = {}

    def __call__(
        self,
        address: str,
        model: str,
        inputs: Mapping[str, np.ndarray],
        outputs: list[str],
        request_id: str,
    ) -> Iterator[dict[str, np.ndarray]]:
        caller, triton = in_process(), self.tritons.get(address)
        assert caller is not None
        if triton is None or not triton.process.is_alive or triton.worker is None:
            sleep(loop().rng.random() * CONNECT_S_MAX)
            raise from_broken_call(model, "UNAVAILABLE", NEVER_SENT)
        call = self._running[request_id] = Call(triton, caller)
        seen = loop().seen
        seen["calls"] += 1
        seen["calls of further attempts"] += not request_id.endswith("-1")
        try:
            request = inputs[REQUEST_IDS].copy(), bytes(inputs[REQUEST_BODY][0])
            if not call.out.send(lambda what: _arrive(triton, call, what), request):
                call.lost(LINK_CUT)
            answer = call.answers.get()
            if isinstance(answer, Exception):
                seen["calls that broke"] += 1
                raise answer
            yield answer
        finally:
            call.is_over = True
            if self._running.get(request_id) is call:
                del self._running[request_id]

    def cancel(self, request_id: str) -> None:
        if (call := self._running.get(request_id)) is not None:
            call.answers.put(WorkerUnavailable("cancelled"))

    def probe(self, address: str) -> None:
        caller, triton = in_process(), self.tritons.get(address)
        assert caller is not None
        sleep(loop().rng.random() * CONNECT_S_MAX)
        if triton is None or not triton.process.is_alive or triton.worker is None:
            raise from_broken_call(address, "UNAVAILABLE", NEVER_SENT)
        here, there, network = caller.host, triton.process.host, triton.network
        if network.is_cut(here, there) or network.is_cut(there, here):
            raise from_broken_call(address, "UNAVAILABLE", NEVER_SENT)
        loop().seen["workers reached again"] += 1

    def keep(self, addresses: set[str]) -> None: ...

    def close(self) -> None: ...


def _arrive(triton: Triton, call: Call, request: tuple[np.ndarray, bytes]) -> None:
    process = triton.process
    if not process.is_alive:
        if triton.is_reset:
            call.lost(RESET)
        return
    triton.under_way[id(call)] = call

    def execute() -> None:
        reply = GreenReply(call)
        try:
            triton.worker.submit(triton.parse(request[1]), request[0], reply)
        except Exception as error:  # Catch all: as in WorkerModel.execute
            reply.fail(error)

    def begin(_: Any) -> None:
        spawn(process, execute, "execute")

    loop().at(loop().now_s, begin, None, process)


def ended(triton: Triton) -> None:
    """Its process has died: what was under way hangs, or is reset."""
    calls, triton.under_way = list(triton.under_way.values()), {}
    if triton.is_reset:
        for call in calls:
            call.lost(RESET)


__all__ = ["GreenCalls", "Triton", "ended"]
