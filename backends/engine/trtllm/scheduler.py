"""The connector's scheduler for TensorRT-LLM, with the differences between its releases.

TensorRT-LLM calls `match` once for each request, while it holds the lock of its own prefix tree. A
release shows the cache salt of a request, or only a number made of it. The position of a new
request includes the loaded tokens, or does not.

Some releases do not call `finished` for a cancelled or failed request. The next pass may then write
the request's pages while they are still being saved. So a request that is missing in a step, and
was not finished, is a *fence*: its saves must end before that pass.

Not here: the staged prompts, loads and saves (../connected/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from backends.engine.connected import messages as m
from backends.engine.connected.block_pages import LlmId, Orders
from backends.engine.connected.scheduler import Entry, Salt, StageScheduler


class RequestData(Protocol):
    """TensorRT-LLM's description of one request in a step."""

    request_id: int
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


class TrtllmScheduler(StageScheduler):
    def __init__(
        self,
        block_tokens: int,
        tokens_per_block: int,
        send: Callable[[m.ToWorker], None],
        salt_id: Callable[[str], int] | None = None,
        aside_pages_min: int = 0,
    ) -> None:
        """`salt_id`: TensorRT-LLM's function that makes a number of a salt; None: it has none."""
        super().__init__(block_tokens, tokens_per_block, send, aside_pages_min)
        self._salt_id = salt_id
        self._saving: set[LlmId] = set()  # requests with ordered saves that may need a fence

    def _salts(self, cache_salt: str) -> tuple[Salt, ...]:
        if not cache_salt or self._salt_id is None:
            return (cache_salt,)
        return cache_salt, self._salt_id(cache_salt)

    def match(self, request: Any, local_tokens: int) -> int:
        """Tokens after the local ones that need not be computed."""
        salt = _salt(request)
        if salt is None:
            return 0
        return self.promise(request.request_id, request.get_tokens(0), salt, local_tokens)

    def orders(self, new: Sequence[RequestData], cached: Sequence[RequestData]) -> Orders:
        missing: set[LlmId] = set()
        if self._saving:
            missing = self._saving.difference([data.request_id for data in cached])
            missing.difference_update([data.request_id for data in new])
            self._saving -= missing
        orders = super().orders(new, cached)
        self._saving.update([move.llm_id for move in orders.saves])
        return orders._replace(fences=sorted(missing)) if missing else orders

    def _given(self, entry: Entry, block_ids: Sequence[int]) -> None:
        if len(block_ids) * self._tokens_per_block < entry.stage.token_count:
            raise RuntimeError(
                f"TensorRT-LLM gave {len(block_ids)} pages of {self._tokens_per_block} tokens for "
                f"a prompt of {entry.stage.token_count} at first: its KV cache manager V2 is not "
                "supported"
            )
        super()._given(entry, block_ids)

    def _position(self, entry: Entry, data: RequestData, is_new: bool) -> int:
        start, prompt_tokens = data.computed_position, entry.stage.token_count
        if is_new:
            start = min(entry.local_tokens, start) + entry.load_pages * self._tokens_per_block
        if entry.position >= prompt_tokens:
            # It generates: one token is certain, drafts are not. The overlap scheduler reports the
            # position before this pass, so a page may be saved one step later.
            return max(entry.position, start + 1)
        if start < entry.position:
            raise RuntimeError(
                f"TensorRT-LLM is at token {start} of a prompt that it should have computed up to "
                f"{entry.position}: pages may have been saved before they were computed"
            )
        if not hasattr(data, "num_scheduled_tokens"):
            raise RuntimeError(
                "this TensorRT-LLM does not report how many tokens it computes: 1.2.0rc2 or later "
                "is needed"
            )
        return min(start + data.num_scheduled_tokens, prompt_tokens)

    def finished(self, request: Any) -> bool:
        self._saving.discard(request.request_id)
        return super().finished(request)


def _salt(request: Any) -> Salt | None:
    """The request's cache salt; None if its KV depends on more than tokens and a salt.

    The request that `match` gets is the C++ one. It may lack attributes that later calls have.
    """
    # Written out, because TensorRT-LLM waits for it.
    if getattr(request, "lora_task_id", None) is not None:
        return None
    if getattr(request, "multimodal_hashes", None):
        return None
    if getattr(request, "multimodal_positions", None):
        return None
    salt = getattr(request, "cache_salt", None)
    if salt is None:
        salt = getattr(request, "cache_salt_id", None)
    return "" if salt is None else salt
