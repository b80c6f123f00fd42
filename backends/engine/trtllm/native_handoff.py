"""TensorRT-LLM's own hand-over: what a context-only request leaves for a generation-only one.

KV goes from GPU to GPU by its cache transceiver; what goes through us is the description of where
it lies (`DisaggregatedParams`), as bytes in the replies and requests of workers. Fields that a
release does not know are left out, what is not plain data stays behind.

Not here: who gets them (../../worker_protocol.py).
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from backends.engine.trtllm.package import only_accepted

FIELDS = (
    "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens", "disagg_request_id",
    "ctx_dp_rank", "ctx_info_endpoint",
)  # fmt: skip
CONTEXT_ONLY, GENERATION_ONLY = "context_only", "generation_only"


def for_prefill(cls: Any, request_id: str) -> Any:
    """`cls` is tensorrt_llm.DisaggregatedParams. The Python transceiver needs a number of its own
    for each request; the others do not look at it."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 2  # it must fit into a signed 64-bit integer
    welcome = only_accepted(cls, {"disagg_request_id": number})
    return cls(request_type=CONTEXT_ONLY, **welcome)


def packed(result: Any) -> bytes:
    """Of a context-only result; b"" of any other."""
    params = getattr(result.outputs[0], "disaggregated_params", None) or getattr(
        result, "disaggregated_params", None
    )
    if params is None:
        return b""
    values = {name: getattr(params, name, None) for name in FIELDS}
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if isinstance(value, (int, str, bytes, list, tuple))
    }
    return msgspec.msgpack.encode(plain)


def for_decode(cls: Any, state: bytes) -> Any:
    values: dict[str, Any] = msgspec.msgpack.decode(state)
    return cls(request_type=GENERATION_ONLY, **only_accepted(cls, values))
