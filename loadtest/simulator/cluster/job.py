"""One request on its way through the simulated cluster: what is known of it, and what came of it.

Records only. `Job` is what the nodes work on; `summary` (outcome.py) reads it when all is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conductor.messages import Reject, Request, Route


@dataclass(slots=True, eq=False)
class Job:
    """Seconds are of the virtual clock; None: it did not come so far."""

    number: int  # place in the trace
    request: Request  # of the current try
    output_tokens: int  # what it will have generated when it ends
    arrived_s: float
    tries: int = 1
    route: Route | None = None
    reject: Reject | None = None
    refused: str = ""  # by the decode worker when it came there, or a worker's error
    started_s: float | None = None  # its first chunk began to be computed
    loaded_s: float | None = None  # its cached prefix was in the pages
    cached_tokens: int = 0
    fetched_blocks: int = 0
    compute_s: float = 0.0  # seconds of the steps that it took part in
    own_compute_s: float = 0.0  # its share of those, by new tokens
    lost_compute_s: float = 0.0  # of that, what workers that died took with them
    prefilled_s: float | None = None  # its first token was computed
    handover_s: float = 0.0  # from its first token, and from when decode had room, to KV there
    joined_s: float | None = None  # its first decode step began
    finished_s: float | None = None
    tbt_s: float = 0.0  # mean of the longest 10 % of the intervals between its tokens
    tbt_decode_s: float = 0.0  # the same without the first interval, prefill to decode

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def keys(self) -> Sequence[bytes]:
        return self.request.block_keys

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def is_over(self) -> bool:
        return self.finished_s is not None or self.reject is not None or bool(self.refused)
