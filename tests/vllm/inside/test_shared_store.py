"""vLLM without a worker shares prefixes through a real store: MooncakeTritonConnector."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from backends.engine.plain_vllm.prefixes import TRANSFER_CONFIG
from tests.mooncake_store.processes import SiteProcesses

if TYPE_CHECKING:
    from tests.vllm.inside.conftest import Engines
    from tests.vllm.inside.real_engine import RealExecutor, RealRequest

pytestmark = pytest.mark.servers

TOKENS, BLOCK = 8, 64


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path)
    made.node("a", 64)
    yield made
    made.close()


class Plain:
    """A plain server's engine. One runs at a time, so a second one finds nothing in the first's
    memory."""

    def __init__(self, engines: Engines, address: str, blocks: int = 80, **further: Any) -> None:
        engines.close()
        self.family, self._plain = engines.family("llama")
        extra = {"directory": address, "node_id": "a", **further}
        transfer = {**TRANSFER_CONFIG, "kv_connector_extra_config": extra}
        from tests.vllm.inside.real_engine import SMALL_ENGINE, RealExecutor

        arguments = {
            **SMALL_ENGINE,
            "model": str(self.family.folder),
            "block_size": 32,
            "num_gpu_blocks_override": blocks,
            "skip_tokenizer_init": True,
            "kv_transfer_config": transfer,
        }
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.executor: RealExecutor = RealExecutor(engine)
        self.connector: Any = self.executor.scheduler.connector
        self.loaded: list[int] = []
        self._count_loads()

    def _count_loads(self) -> None:
        promised = self.connector._scheduler.promised

        def counting(llm_id: Any, block_ids: Any, loaded_tokens: int) -> None:
            self.loaded.append(loaded_tokens)
            promised(llm_id, block_ids, loaded_tokens)

        self.connector._scheduler.promised = counting

    def submit(self, prompt: list[int], name: str, salt: str | None = None) -> RealRequest:
        from tests.vllm.inside.real_engine import RealRequest

        params = SamplingParams(
            max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False
        )
        request = RealRequest(name, prompt, list(prompt))
        self.executor.submit(request, params, salt)
        return request

    def check(self, prompts: list[list[int]], salt: str | None = None) -> int:
        """Ask all at once, and compare with transformers; loaded tokens."""
        self.loaded.clear()
        asked = [self.submit(prompt, f"{i}", salt) for i, prompt in enumerate(prompts)]
        self.executor.run_until_idle()
        for request, prompt in zip(asked, prompts, strict=True):
            assert request.tokens[len(prompt) :] == self._plain.tokens(prompt, TOKENS), len(prompt)
        return sum(self.loaded)

    def forget(self) -> None:
        """Empty vLLM's own cache, when all blocks are in the store."""
        self._wait_until_free()
        assert self.executor.engine.reset_prefix_cache()

    def _wait_until_free(self) -> None:
        prefixes = self.connector._prefixes
        for _ in range(4000):
            if not prefixes.used_pages and not self.connector._pinned:
                return
            self.executor.step()
            self.executor._idle.wait(0.005)
        raise AssertionError("pages of the staging pool are still used")

    def close(self) -> None:
        try:
            assert not self.executor.scheduler.requests
            self._wait_until_free()
            self.connector._prefixes.check()
            pool = self.executor.pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        finally:
            self.executor.shutdown()
        files = self.connector._files
        assert not files.pool.exists() and not files.folder.exists()


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(10, 2048) for _ in range(n)] for n in lengths]


LENGTHS = [63, 64, 65, 127, 128, 129, 400]
WHOLE = [n // BLOCK * BLOCK for n in LENGTHS]


def test_the_second_server_computes_no_whole_block_that_the_first_has_computed(
    engines: Engines, site: SiteProcesses
) -> None:
    prompts = prompts_of(LENGTHS, 7)
    first = Plain(engines, site.address)
    assert first.check(prompts) == 0
    first.close()
    second = Plain(engines, site.address)
    # vLLM computes the last token of a prompt in any case.
    wanted = sum(min(whole, n - 1) for whole, n in zip(WHOLE, LENGTHS, strict=True))
    assert second.check(prompts) == wanted
    # Its own cache has all but the last page of a prompt that fills it: 31 tokens of two prompts.
    assert second.check(prompts) == 62
    assert second.check(prompts, salt="another tenant") == 0
    second.close()


def test_a_dead_node_costs_time_only(engines: Engines, site: SiteProcesses) -> None:
    prompts = prompts_of(LENGTHS, 8)
    server = Plain(engines, site.address, deadline_s=1.0)
    server.check(prompts)
    server.forget()
    assert server.check(prompts) > sum(WHOLE) - len(prompts), "they come from the store"
    server.forget()
    site.nodes["a"].end(signal.SIGKILL)
    assert server.check(prompts) == 0
    server.forget()
    site.directory.end(signal.SIGKILL)
    assert server.check(prompts) == 0
    server.close()


def test_aborts_at_every_phase_with_few_pages_leave_nothing(
    engines: Engines, site: SiteProcesses, seed: int
) -> None:
    chance = random.Random(seed)
    prompts = prompts_of([64, 100, 192, 256, 320], 9)
    server = Plain(engines, site.address, blocks=17, pool_bytes=40 * 64 * 8192)
    server.check(prompts)
    going: list[RealRequest] = []
    for number in range(200):
        if chance.random() < 0.2:
            server.executor.engine.reset_prefix_cache()
        going.append(server.submit(chance.choice(prompts), f"a{number}"))
        for _ in range(chance.randrange(6)):
            server.executor.step()
        if len(going) > 3:
            server.executor.abort(going.pop(chance.randrange(len(going))))
    server.executor.run_until_idle()
    server.check(prompts)
    server.close()


def test_requests_whose_kv_depends_on_more_than_tokens_are_computed() -> None:
    from backends.engine.plain_vllm.connector import is_of_tokens

    plain = {
        "mm_features": [],
        "lora_request": None,
        "prompt_embeds": None,
        "prompt_token_ids": [1],
    }
    assert is_of_tokens(SimpleNamespace(**plain))
    for name, value in {
        "mm_features": ["image"],
        "lora_request": "adapter",
        "prompt_embeds": "tensor",
        "prompt_token_ids": None,
    }.items():
        assert not is_of_tokens(SimpleNamespace(**{**plain, name: value})), name
