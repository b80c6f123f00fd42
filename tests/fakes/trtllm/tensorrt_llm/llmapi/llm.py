"""The LLM class of the stand-in: the documented calls, over the small executor.

As the real one it takes keywords only where releases differ, wants a running event loop for its
results, hands out one mutable object again and again, and finds out about the model by itself. It
computes kv_model.py instead of the weights in the folder: greedy, whatever the sampling asks for.

Not here: when connectors are called (_fake/executor.py).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorrt_llm._fake.executor import Executor
from tensorrt_llm._fake.executor_process import ProcessExecutor
from tensorrt_llm._fake.kv_model import KvShape
from tensorrt_llm._fake.request import LlmRequest
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

STATS_POLL_S = 0.02


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None


@dataclass(kw_only=True)
class GuidedDecodingParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    detokenize: bool = True
    guided_decoding: GuidedDecodingParams | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None
    _last_length: int = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_length :]


Event = tuple[list[int], "str | None"]


class RequestOutput:
    """Of one generation: to be awaited, or iterated when streaming."""

    def __init__(
        self,
        executor: Executor | ProcessExecutor,
        request: LlmRequest,
        disaggregated: DisaggregatedParams | None,
    ) -> None:
        self._executor = executor
        self._request = request
        self._disaggregated = disaggregated
        self._loop = asyncio.get_running_loop()  # as the real one, useless outside of a loop
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.request_id = request.request_id
        self.prompt_token_ids = list(request.prompt)
        self.outputs = [CompletionOutput()]
        self.finished = False
        request.on_output = self._on_output

    def abort(self) -> None:
        self._executor.abort(self._request)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._all().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        self._take(await self._events.get())
        return self

    async def _all(self) -> RequestOutput:
        while not self.finished:
            self._take(await self._events.get())
        return self

    def _on_output(self, token_ids: list[int], reason: str | None) -> None:
        """In the executor's thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (list(token_ids), reason))

    def _take(self, event: Event) -> None:
        token_ids, reason = event
        output = self.outputs[0]
        output._last_length = len(output.token_ids)
        output.token_ids += token_ids
        if reason is None:
            return
        self.finished, output.finish_reason = True, reason
        if self._request.kind == "context_only" and reason != "cancelled":
            output.disaggregated_params = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=list(output.token_ids),
                ctx_request_id=self.request_id,
                opaque_state=self._request.opaque_state,
            )


class LLM:
    def __init__(self, model: str, **keywords: Any) -> None:
        self.args = TorchLlmArgs(model=model, **keywords)
        self._ids = itertools.count(1)
        is_single = os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") == "1"
        made = Executor if is_single else ProcessExecutor
        self._executor: Executor | ProcessExecutor = made(self.args, shape_of(self.args))
        self._executor.start()

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        self._fail_on_demand()
        prompt = list(inputs["prompt_token_ids"] if isinstance(inputs, dict) else inputs)
        sampling = sampling_params or SamplingParams()
        if self.args.skip_tokenizer_init and sampling.end_id is None:
            raise ValueError("end_id must be set when there is no tokenizer")
        request = LlmRequest(
            next(self._ids),
            prompt,
            sampling.max_tokens,
            end_id=-1 if sampling.ignore_eos or sampling.end_id is None else sampling.end_id,
            cache_salt=cache_salt,
        )
        if disaggregated_params is not None:
            assert self.args.cache_transceiver_config is not None, "no cache transceiver"
            request.kind = str(disaggregated_params.request_type)
            request.opaque_state = disaggregated_params.opaque_state or b""
        output = RequestOutput(self._executor, request, disaggregated_params)
        self._executor.submit(request)
        if self._executor.error is not None:
            raise RuntimeError(f"the executor failed: {self._executor.error}")
        return output

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        if not self.args.enable_iter_perf_stats:
            raise ValueError("enable_iter_perf_stats is off")
        until_s = time.monotonic() + (timeout or 0)
        stats = self._executor.stats
        while time.monotonic() < until_s:
            while stats:
                yield stats.popleft()
            await asyncio.sleep(STATS_POLL_S)

    def _check_health(self) -> bool:
        return self._executor.error is None

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _fail_on_demand(self) -> None:
        """FAKE_TRTLLM_FAILS names a file; the engine of whose worker it speaks fails for good."""
        path = Path(os.environ.get("FAKE_TRTLLM_FAILS", "/nonexistent"))
        if path.exists() and f"kv-{path.read_text()}-" in os.environ["TLLM_MOONCAKE_CONNECTOR"]:
            self._executor.error = RuntimeError("CUDA error: an illegal memory access")
            self._executor.shutdown()


def shape_of(args: TorchLlmArgs) -> KvShape:
    """From config.json, as the engine's loader finds it."""
    raw = json.loads((Path(args.model) / "config.json").read_text())
    heads = raw["num_attention_heads"]
    kept_in = args.kv_cache_config.dtype
    kv_heads, head_dim = raw.get("num_key_value_heads", heads), raw.get("head_dim")
    if latent := raw.get("kv_lora_rank"):
        kv_heads, head_dim = 1, latent + raw["qk_rope_head_dim"]
    return KvShape(
        layers=raw["num_hidden_layers"],
        kv_heads=kv_heads,
        head_dim=head_dim or raw["hidden_size"] // heads,
        kv_factor=1 if latent else 2,
        # Not args.dtype: the PyTorch flow does not read it.
        dtype=kept_in
        if kept_in != "auto"
        else (args.model_kwargs or {}).get("torch_dtype") or raw.get("dtype") or raw["torch_dtype"],
        tokens_per_block=args.kv_cache_config.tokens_per_block,
        vocabulary_tokens=raw["vocab_size"],
    )
