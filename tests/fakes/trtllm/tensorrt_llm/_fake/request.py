"""One request inside the executor, with the attributes that connectors may use."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from tensorrt_llm._fake.api import HAS_NEW_API
from tensorrt_llm.inputs import get_cache_salt_id

OnOutput = Callable[[list[int], "str | None"], None]  # new tokens, finish reason


class State(enum.Enum):
    CONTEXT_INIT = enum.auto()
    GENERATION_IN_PROGRESS = enum.auto()
    DISAGG_GENERATION_TRANS_IN_PROGRESS = enum.auto()  # KV is on its way: an asynchronous load
    GENERATION_COMPLETE = enum.auto()


@dataclass(eq=False)
class LlmRequest:
    request_id: int
    prompt: list[int]
    max_tokens: int
    end_id: int = -1
    cache_salt: str | None = None
    kind: str = "normal"  # normal | context_only | generation_only
    opaque_state: bytes = b""
    on_output: OnOutput = lambda new, reason: None
    lora_task_id: int | None = None
    multimodal_hashes: list[list[int]] | None = None
    state: State = State.CONTEXT_INIT
    is_aborted: bool = False

    # The executor's own.
    tokens: list[int] = field(default_factory=list)  # as the host knows them
    block_ids: list[int] = field(default_factory=list)
    is_allocated: bool = False
    local_tokens: int = 0
    matched_tokens: int = 0
    context_current_position: int = 0
    context_chunk_size: int = 0  # of this step
    kv_tokens: int = 0  # computed or loaded, as the device has them
    device_tokens: list[int] = field(default_factory=list)  # sampled ones the host may not know yet
    finish_reason: str | None = None
    py_num_connector_matched_tokens: int = 0
    is_loaded: bool = False  # an asynchronous load is over
    asked_tokens: int = 0  # of the client's prompt; `prompt` grows when a request begins again

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.asked_tokens = len(self.prompt)
        self.device_tokens = list(self.prompt)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0, "beams are not supported with a connector"
        return list(self.tokens)

    def get_num_tokens(self, beam: int) -> int:
        return len(self.tokens)

    def begin_again(self) -> None:
        """Its pages are gone: what it has generated becomes a part of its prompt."""
        self.prompt = list(self.tokens)
        self.device_tokens = list(self.tokens)
        self.block_ids, self.state = [], State.CONTEXT_INIT
        self.local_tokens = self.matched_tokens = self.kv_tokens = 0
        self.context_current_position = self.context_chunk_size = 0

    @property
    def context_remaining_length(self) -> int:
        return len(self.prompt) - self.context_current_position

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.asked_tokens


class VisibleRequest:
    """What a connector is handed: the attributes that the C++ request has bound, no others."""

    def __init__(self, request: LlmRequest) -> None:
        self.request_id = request.request_id
        self.lora_task_id = request.lora_task_id
        self.multimodal_hashes = request.multimodal_hashes
        self.context_current_position = request.context_current_position
        salt = request.cache_salt
        self.cache_salt_id = None if salt is None else get_cache_salt_id(salt)
        if HAS_NEW_API:
            self.cache_salt = salt
        self._request = request

    def get_tokens(self, beam: int) -> list[int]:
        return self._request.get_tokens(beam)
