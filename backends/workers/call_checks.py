"""Is a call to a worker one that it can serve? Every reason why not, before it joins a batch.

The frontend has checked what clients send; a worker looks again, because one value that its engine
cannot take would fail all requests of the batch. Pure. Not here: who may call (triton_io.py), which
blocks are due (decode_worker.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backends.engine.sampling_params import SamplingLimits
from backends.errors import RequestInvalid
from backends.workers.protocol import DecodeRequest, PrefillRequest

REQUEST_ID_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What a worker can serve."""

    context_tokens_max: int
    vocabulary_tokens: int
    inboxes: str = ""  # what addresses of this launch's inboxes begin with

    def check(self, request: PrefillRequest | DecodeRequest, ids: np.ndarray) -> None:
        """Raises RequestInvalid with every reason."""
        if found := list(_problems(request, ids, self)):
            raise RequestInvalid("; ".join(found))


def _problems(
    request: PrefillRequest | DecodeRequest, ids: np.ndarray, limits: CallLimits
) -> Iterator[str]:
    least, context = (2 if isinstance(request, DecodeRequest) else 1), limits.context_tokens_max
    if not 1 <= len(request.request_id) <= REQUEST_ID_CHARACTERS_MAX:
        yield f"request_id has {len(request.request_id)} characters"
    if not least <= len(ids) <= context:
        yield f"{len(ids)} input_ids came; this worker takes {least} to {context}"
    elif int(ids.min()) < 0 or int(ids.max()) >= limits.vocabulary_tokens:
        yield f"input_ids must be 0 to {limits.vocabulary_tokens - 1}"
    if not 1 <= request.prompt_tokens <= len(ids):
        yield f"prompt_tokens is {request.prompt_tokens} of {len(ids)} input_ids"
    yield from request.sampling.problems(
        SamplingLimits(request.prompt_tokens, context, limits.vocabulary_tokens)
    )
    inboxes = [request.reply_inbox]
    if isinstance(request, PrefillRequest):
        inboxes.append(request.decode_inbox)
        if request.fetch_blocks < 0:
            yield f"fetch_blocks is {request.fetch_blocks}"
        if not 0 <= request.reserve_tokens <= context:
            yield f"reserve_tokens is {request.reserve_tokens}; use 0 to {context}"
    elif request.stream_interval < 0:
        yield f"stream_interval is {request.stream_interval}"
    for inbox in inboxes:
        if inbox and not inbox.startswith(limits.inboxes):
            yield f"{inbox!r} is no inbox of this launch"
