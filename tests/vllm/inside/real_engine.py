"""The real vLLM with our connector, in the process of the test, stepped by hand.

The worker's side is that of the other engines (`Connected`): host of the channel, staging pool,
slots of a storage node. EngineCore runs in this process. So a test can step it, read its pool of
pages, and hold copies by a gate. A process can have one such engine at a time, because
torch.distributed and vLLM's connector are global. `Engines` (conftest.py) keeps one, and starts
another one for other options.

The expected tokens are those of transformers, a second implementation of the model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from vllm import SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from backends.engine.connected import messages as m
from backends.engine.vllm import connector as connector_module
from backends.engine.vllm import messages as m_llm
from backends.engine.vllm import process
from backends.engine.vllm.guided import GUIDED_BACKEND
from backends.engine.vllm.logits_processors import GivenTokensV1
from backends.engine.vllm.settings import CONNECTOR
from backends.token_logprobs import TOP_LOGPROBS_MAX
from mooncake_store.block_keys import chain_seed
from mooncake_store.layout import blocks_touched
from tests.backends.engine.connected.connected import Connected
from tests.backends.engine.connected.listening import WAIT_S, Heard

BLOCK_TOKENS = 64  # of a store block
IDLE_S = 0.001  # as vLLM waits after a step without a pass
STEPS_MAX = 20_000
SMALL_ENGINE: dict[str, Any] = {  # arguments of each engine of these tests
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 2**27,
    "enforce_eager": True,
    "disable_hybrid_kv_cache_manager": True,
    "disable_log_stats": True,
}


@dataclass(eq=False)
class RealRequest:
    name: str  # vLLM's external id, and the worker's request id
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)  # prompt and output
    finish_reason: str | None = None
    error: str = ""
    news: Any = None  # vLLM's newest CompletionOutput


@dataclass(frozen=True)
class Family:
    """A random checkpoint, and what its KV looks like in vLLM."""

    folder: Path
    page_tokens: int
    is_latent: bool
    continues: bool = True  # prefill may go on after a prefix

    @property
    def config(self) -> Any:
        return transformers.AutoConfig.from_pretrained(self.folder)

    @property
    def token_bytes(self) -> int:
        """KV of a token in float32."""
        config = self.config
        if self.is_latent:
            scalars = config.kv_lora_rank + config.qk_rope_head_dim
        else:
            scalars = 2 * config.num_key_value_heads * config.head_dim
        return int(config.num_hidden_layers * scalars * 4)


class PlainModel:
    """Greedy tokens of a checkpoint by transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Of the token after these, in float32."""
        found: np.ndarray = self._model(torch.tensor([list(token_ids)])).logits[0, -1].numpy()
        return found

    @torch.inference_mode()
    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            ids = torch.tensor([list(prompt)])
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            known = self._known[tuple(prompt)] = output[0, len(prompt) :].tolist()
        return known[:count]


class RealExecutor:
    """vLLM's engine behind the verbs of the other executors."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.core: Any = engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.scheduler: Any = self.core.scheduler
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self._going: dict[str, RealRequest] = {}
        self._idle = threading.Event()  # never set

    @property
    def blocks(self) -> Any:
        return SimpleNamespace(
            blocks=self.pool.num_gpu_blocks - 1, free_blocks=self.pool.get_num_free_blocks()
        )

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests())

    def submit(self, request: RealRequest, params: SamplingParams, salt: str | None) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt}
        if salt:
            prompt["cache_salt"] = salt
        self.engine.add_request(request.name, prompt, params)
        self._going[request.name] = request

    def step(self) -> None:
        outputs = self.engine.step()
        for output in outputs:
            request = self._going.get(output.request_id)
            if request is not None:
                request.tokens = request.prompt + list(output.outputs[0].token_ids)
                request.news = output.outputs[0]
                if output.finished:
                    request.finish_reason = output.outputs[0].finish_reason
                    del self._going[output.request_id]
        if not outputs and self.has_work:
            self._idle.wait(IDLE_S)  # copies run in another thread

    def run_until_idle(self) -> None:
        for _ in range(STEPS_MAX):
            if not self.has_work:
                return
            self.step()
        raise AssertionError("vLLM is still busy")

    def abort(self, request: RealRequest) -> None:
        if self._going.pop(request.name, None) is not None:
            self.engine.abort_request([request.name])
            request.finish_reason = "cancelled"

    def shutdown(self) -> None:
        """End EngineCore, and what of vLLM is global in this process. Now, and not when the garbage
        collector finds it: then there may be another engine."""
        self.engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()


class RealVllm(Connected):
    def __init__(self, folder: Path, family: Family, plain: PlainModel, **options: Any) -> None:
        self.family, self._plain = family, plain
        self._computed: dict[tuple[tuple[int, ...], int], list[int]] = {}
        shape = SimpleNamespace(
            tokens_per_block=family.page_tokens, kv_factor=1 if family.is_latent else 2
        )
        super().__init__(
            folder, shape, family.token_bytes, block_tokens=BLOCK_TOKENS, pool_pages=40, **options
        )

    def _start(self, site: m.Site, options: dict[str, Any]) -> None:
        """`options`: further arguments of vLLM, and `blocks`, the pages of its KV memory."""
        blocks = options.pop("blocks", 80)
        os.environ |= site.to_environment()
        arguments = {
            **SMALL_ENGINE,
            "model": str(self.family.folder),
            "block_size": self.family.page_tokens,
            "num_gpu_blocks_override": blocks,
            "skip_tokenizer_init": not (self.family.folder / "tokenizer.json").exists(),
            "enable_prefix_caching": True,
            "generation_config": "vllm",
            "kv_transfer_config": CONNECTOR,
            "logits_processors": [GivenTokensV1],
            "structured_outputs_config": StructuredOutputsConfig(**GUIDED_BACKEND),
            "max_logprobs": TOP_LOGPROBS_MAX,
        }
        engine = LLMEngine.from_engine_args(EngineArgs(**{**arguments, **options}))
        self.executor = RealExecutor(engine)
        self.in_scheduler = self.executor.scheduler.connector
        self.in_rank: Any = get_kv_transfer_group()
        self.scheduler, self.copies = self.in_scheduler._scheduler, [self.in_rank._copies]

    def submit(
        self,
        number: int,
        prompt: Sequence[int],
        tokens_max: int,
        salt: str | None = None,
        name: str | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> RealRequest:
        """`name`: of the stage; None: the request carries no kv_transfer_params. `sampling`:
        keywords as a worker sends them; None: greedy, and no token ends the answer."""
        wanted = sampling or {"max_tokens": tokens_max, "temperature": 0.0, "ignore_eos": True}
        params = process.vllm_params(m_llm.Generate(0, name or "", b"", wanted))
        params.output_kind = RequestOutputKind.CUMULATIVE
        request = RealRequest(f"{number}-{name}", list(prompt), list(prompt))
        self.executor.submit(request, params, salt)
        return request

    def ask(self, name: str, prompt: Sequence[int], tokens_max: int, **options: Any) -> RealRequest:
        """Generates for a stage until vLLM is idle."""
        return self.generate(0, prompt, tokens_max, name=name, **options)  # type: ignore[no-any-return]

    def expected(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """By transformers. With latent attention by vLLM without loads, because the decode kernel
        of vLLM for CPUs gives other tokens than its prefill and transformers."""
        if not self.family.is_latent:
            return self._plain.tokens(prompt, tokens)
        key = (tuple(prompt), tokens)
        if key not in self._computed:
            self._computed[key] = self.output(self.generate(-1, prompt, tokens, salt="expected"))
        return self._computed[key]

    @property
    def saving(self) -> set[int]:
        return set()  # vLLM frees finished requests at once; pages are pinned instead

    @property
    def pinned(self) -> bool:
        return bool(self.in_scheduler._pinned)

    def forget(self) -> None:
        """Empty vLLM's prefix cache."""
        assert self.executor.engine.reset_prefix_cache()

    def news(self, name: str) -> list[tuple[Any, ...]]:
        """What the worker was notified of for this request, in order."""
        return [(what[0], *what[2:]) for what in self.heard.all if what[1] == name]

    def stage_to_end(
        self,
        name: str,
        prompt: Sequence[int],
        kept: dict[bytes, bytes] | None = None,
        loaded_tokens: int = 0,
    ) -> list[int]:
        """As a handover between workers: KV of all tokens of the prompt is saved, or that of
        `loaded_tokens` tokens is loaded."""
        count = blocks_touched(len(prompt), self.block_tokens)
        pages = [self.free_pages.pop() for _ in range(count)]
        places = [page * self.block_bytes for page in pages]
        stage = self.message(name, prompt, places, loaded_tokens)
        stage = msgspec.structs.replace(stage, is_decode=loaded_tokens > 0)
        for index, page in enumerate(pages):
            self.page(page)[:] = 0xEE
            if kept is not None and index * self.block_tokens < loaded_tokens:
                key = stage.keys[index] if index < len(stage.keys) else b"tail"
                self.page(page)[:] = np.frombuffer(kept[key], np.uint8)
        if kept is None:
            stage = msgspec.structs.replace(stage, saved_tokens_max=len(prompt))
        self.host.stage(stage, WAIT_S).result(WAIT_S)
        return pages

    def message(
        self, name: str, prompt: Sequence[int], places: list[int], loaded_tokens: int
    ) -> m.Stage:
        seed = chain_seed("print", cache_salt="")
        return m.Stage.of(name, prompt, self.block_tokens, seed, "", places, loaded_tokens)

    def check_clean(self) -> None:
        """Nothing of a test is left, in vLLM or in the connector."""
        assert self.all_free, self.executor.blocks
        assert not self.pinned
        assert not self.executor.scheduler.requests
        self.scheduler.check()
        assert not self.scheduler._table.entries and not self.scheduler._table.taken
        assert not [said for said in self.heard.all if said[0] == "broken"], self.heard.all
        (copies,) = self.copies
        assert not copies._is_broken
        assert not copies._loading and not copies._saving and not copies._started
        assert not copies._failed and not copies._draining and not copies._ended
        assert not copies._holed and not copies._given_away

    def new_listener(self) -> None:
        self.heard = Heard()
        self.host._listener = self.heard


def stay_alive() -> None:
    """Instead of `die_with_parent`: EngineCore is this process."""


connector_module.die_with_parent = stay_alive
