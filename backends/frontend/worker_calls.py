"""Calling prefill and decode workers: our structs to tensors and back.

The transport below is handed in (`call`, grpc_calls.py). Not here: what
to call whom for (frontend/frontend.py), what the messages mean (workers/protocol.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np

from backends.errors import WorkerUnavailable, from_wire
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
from conductor.messages import WorkerRef

# (address of its Triton, model, inputs, names of outputs, request id) -> one dict of flat arrays
# per response
Call = Callable[
    [str, str, Mapping[str, np.ndarray], list[str], str], Iterator[dict[str, np.ndarray]]
]
_prefilled = msgspec.msgpack.Decoder(PrefillReply | WorkerFailure)
_decoded = msgspec.msgpack.Decoder(DecodeReply | WorkerFailure)


def as_text(data: bytes | str) -> np.ndarray:
    """One STRING element, the way Triton wants it."""
    return np.array([data], dtype=np.object_)


def prefill(
    call: Call, worker: WorkerRef, request: PrefillRequest, token_ids: np.ndarray
) -> tuple[int, PrefillReply]:
    """(the sampled token, the rest of the reply); raises ServingError."""
    reply: tuple[int, PrefillReply] | None = None
    for answer in _answers(call, worker, request, token_ids):
        body = _prefilled.decode(answer[REPLY_BODY][0])
        if isinstance(body, WorkerFailure):
            raise from_wire(body.message, worker.worker_id)
        reply = int(answer[REPLY_IDS][0]), body
    if reply is None:
        raise WorkerUnavailable(f"{worker.worker_id} ended without an answer")
    return reply


def decode(
    call: Call, worker: WorkerRef, request: DecodeRequest, token_ids: np.ndarray
) -> tuple[np.ndarray, DecodeReply]:
    """(the last token ids, the rest of the reply); raises ServingError."""
    reply: tuple[np.ndarray, DecodeReply] | None = None
    for answer in _answers(call, worker, request, token_ids):
        body = _decoded.decode(answer[REPLY_BODY][0])
        if isinstance(body, WorkerFailure):
            raise from_wire(body.message, worker.worker_id)
        reply = answer[REPLY_IDS], body
    if reply is None:
        raise WorkerUnavailable(f"{worker.worker_id} ended in the middle of a request")
    return reply


def _answers(
    call: Call, worker: WorkerRef, request: PrefillRequest | DecodeRequest, token_ids: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    inputs = {REQUEST_IDS: token_ids.astype(np.int32), REQUEST_BODY: as_text(encode(request))}
    outputs = [REPLY_IDS, REPLY_BODY]
    return call(worker.grpc_address, worker.worker_id, inputs, outputs, request.request_id)
