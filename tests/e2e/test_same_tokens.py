"""Greedy tokens through Triton are those of transformers: every path, first time and from cache.

For each checkpoint one server; the demo checkpoint's is shared. Paths: both pairs on one node (KV
by mapped memory) and across nodes (KV over NIXL), the ensemble, alone and sixteen at once. A path
is new the first time (a tenant of its own), and served from cache the second.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.text.tokenizer import Tokenizer
from bench.harness.generate import generate
from tests.backends.engine.checkpoints import LLAMA3_ROPE, load_reference, make_checkpoint
from tests.backends.engine.reference import Comparison, Reference, greedy
from tests.backends.small_tokenizers import DEMO, EOS, byte_level, write_checkpoint
from tests.e2e.server import Answer, Server, running, wait_until

B = 64
LENGTHS = (1, B - 1, B, B + 1, 5 * B + 3)
OUTPUT_TOKENS = 24
WORDS = ("the library is open ", "Größe ", "1,234 blocks; ", "naïve 🙂 ", "It was a truth. ", "x")
PATHS = {
    "mapped": ("prefill_0", "decode_0"),
    "nixl": ("prefill_0", "decode_1"),
    "nixl back": ("prefill_1", "decode_0"),
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "demo": None,
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2 sharded": ("qwen2", {"max_shard_size": "60KB", "num_hidden_layers": 3}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
}
# Engine and transformers are compared for all kinds without a server, tests/backends/engine/.
PARAMS = [
    pytest.param(name, marks=[] if name == "demo" else pytest.mark.long) for name in CHECKPOINTS
]


@dataclass(slots=True)
class Case:
    server: Server
    texts: dict[int, str]
    prompts: dict[int, list[int]]
    references: dict[int, Reference]

    def ids(self, length: int, path: str, tenant: str) -> Answer:
        prefill, decode = PATHS[path]
        return self.server.ask(
            input_ids=self.prompts[length],
            max_tokens=OUTPUT_TOKENS,
            end_id=-1,
            parameters={"prefill_worker": prefill, "decode_worker": decode, "tenant": tenant},
        )

    def text(self, length: int, model: str, tenant: str = "") -> Answer:
        parameters = {"tenant": tenant} if tenant else {}
        return self.server.ask(
            model, parameters, text_input=self.texts[length], max_tokens=OUTPUT_TOKENS, end_id=-1
        )


def text_of(tokens: int, tokenizer: Tokenizer, chance: random.Random) -> str:
    """A text of exactly so many tokens."""
    text = ""
    while len(tokenizer.encode(text)) < tokens:
        text += chance.choice(WORDS)
    while len(tokenizer.encode(text)) > tokens:
        text = text[:-1]
    while len(tokenizer.encode(text)) < tokens:  # a token lost more than one character
        text += chance.choice("qzj#")
    assert len(tokenizer.encode(text)) == tokens, (tokens, text)
    return text


@pytest.fixture(scope="module", params=PARAMS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, state_dir: Path
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("tokens")
    chosen = CHECKPOINTS[request.param]
    checkpoint = DEMO
    if chosen is not None:
        checkpoint = make_checkpoint(chosen[0], folder / "checkpoint", vocab_size=352, **chosen[1])
        write_checkpoint(checkpoint, byte_level(), {"eos_token": EOS})
    tokenizer = Tokenizer.load(checkpoint)
    chance = random.Random(11)
    texts = {length: text_of(length, tokenizer, chance) for length in LENGTHS}
    prompts = {length: tokenizer.encode(text) for length, text in texts.items()}
    model = load_reference(checkpoint)
    references = {n: greedy(model, prompt, OUTPUT_TOKENS) for n, prompt in prompts.items()}
    compare_engine_alone(prompts, references, checkpoint)
    if chosen is None:
        yield Case(request.getfixturevalue("demo"), texts, prompts, references)
        return
    for server in running(folder / "server", state_dir, {"checkpoint": str(checkpoint)}):
        yield Case(server, texts, prompts, references)


def compare_engine_alone(
    prompts: dict[int, list[int]], references: dict[int, Reference], checkpoint: Path
) -> None:
    engine = TorchEngine.load(checkpoint, 64, B)
    outputs = generate(engine, list(prompts.values()), SamplingParams(OUTPUT_TOKENS))
    comparison = Comparison()
    for length, output in zip(prompts, outputs, strict=True):
        comparison.add(f"engine alone, {length} tokens", output, references[length])
    comparison.check()


@pytest.mark.parametrize("path", PATHS)
def test_every_pair_of_workers_gives_the_tokens_of_transformers(case: Case, path: str) -> None:
    comparison = Comparison()
    for length in LENGTHS:
        for turn in ("first", "again"):
            answer = case.ids(length, path, tenant=path)
            assert not answer.error, answer.error
            expected = min(length // B * B, length - 1) if turn == "again" else 0
            assert answer.cached_tokens == expected, (length, turn)
            comparison.add(f"{path} {length} {turn}", answer.output_ids, case.references[length])
    comparison.check()
    wait_until(case.server.is_idle, "pages, slots and leases to be free")


def test_a_prefix_fetched_over_nixl_gives_the_same_tokens(case: Case) -> None:
    comparison = Comparison()
    before = case.server.metric(
        "mooncake_transfer_bytes_total", transport="nixl", direction="read", model="prefill_1"
    )
    length = 5 * B + 3
    for prefill in ("prefill_0", "prefill_1", "prefill_1"):
        answer = case.server.ask(
            input_ids=case.prompts[length],
            max_tokens=OUTPUT_TOKENS,
            end_id=-1,
            return_decision=True,
            parameters={"prefill_worker": prefill, "decode_worker": "decode_1", "tenant": "f"},
        )
        comparison.add(f"prefix on {prefill}", answer.output_ids, case.references[length])
    comparison.check()
    assert answer.cached_tokens == 5 * B
    wait_until(
        lambda: (
            case.server.metric(
                "mooncake_transfer_bytes_total",
                transport="nixl",
                direction="read",
                model="prefill_1",
            )
            > before
        ),
        "prefill_1 to have read over NIXL (or its own copy)",
    ) if answer.decision["fetched_blocks"] else None


@pytest.mark.parametrize("model", ["conductor", "ensemble"])
def test_text_in_gives_the_same_tokens_and_their_text(case: Case, model: str) -> None:
    comparison = Comparison()
    for length in LENGTHS:
        for _ in ("first", "again"):
            answer = case.text(length, model)
            assert not answer.error, answer.error
            comparison.add(f"{model} {length}", answer.output_ids, case.references[length])
            whole = case.server.ask(
                text_input=case.texts[length], max_tokens=OUTPUT_TOKENS, end_id=-1
            )
            assert answer.text == whole.text
    comparison.check()


def test_sixteen_at_once_give_the_same_tokens(case: Case) -> None:
    comparison = Comparison()
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for turn in ("first", "again"):
            answers = pool.map(lambda n: case.text(n, "conductor", tenant="many"), lengths)
            for length, answer in zip(lengths, answers, strict=True):
                assert not answer.error, answer.error
                comparison.add(f"16 {length} {turn}", answer.output_ids, case.references[length])
    comparison.check()
    wait_until(case.server.is_idle, "pages, slots and leases to be free")
