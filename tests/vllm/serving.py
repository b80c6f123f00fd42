"""A real server whose workers run vLLM, and what plain vLLM answers. Not here: the tests."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.server import ROOT, Server, running
from tests.e2e.trtllm import set_parameter

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
DEMO = ROOT / "backends" / "demo_checkpoint"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
BORDERS = (63, 64, 65, 127, 128, 129, 900)  # prompts at borders of blocks of 64 tokens
PROGRAM_S_MAX = 300.0


def program(module: str, *arguments: str, asked: Any = None) -> bytes:
    """The output of a module of ours that runs in the interpreter of vLLM."""
    done = subprocess.run(
        [str(PYTHON), "-m", module, *arguments],
        input=json.dumps(asked).encode(),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PROGRAM_S_MAX,
        check=True,
    )
    return done.stdout


def random_checkpoint(family: str, folder: Path) -> Path:
    """With the tokenizer of the demo checkpoint, which has as many tokens."""
    program("tests.vllm.random_checkpoints", family, str(folder))
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO / name, folder / name)
    return folder


def plain_tokens(
    checkpoint: Path, prompts: Sequence[Sequence[int]], tokens: int, **arguments: Any
) -> list[list[int]]:
    """The greedy answers of plain vLLM."""
    asked = [PlainRequest(prompt) for prompt in prompts]
    return [answer.token_ids for answer in plain_answers(checkpoint, asked, tokens, **arguments)]


class PlainRequest(NamedTuple):
    prompt: Sequence[int]
    sampling: Mapping[str, Any] = {}  # further keywords of vLLM's SamplingParams


class PlainAnswer(NamedTuple):
    token_ids: list[int]
    log_probs: list[float]  # of each token, if `sampling` has `logprobs`


def plain_answers(
    checkpoint: Path, requests: Sequence[PlainRequest], tokens: int, **arguments: Any
) -> list[PlainAnswer]:
    """The greedy answers of plain vLLM. `tokens`: of each answer, unless its sampling differs."""
    asked = {
        "model": str(checkpoint),
        "prompts": [list(request.prompt) for request in requests],
        "sampling": [dict(request.sampling) for request in requests],
        "tokens": tokens,
        "arguments": {"max_model_len": 1536, **arguments},
    }
    found = json.loads(program("tests.vllm.plain_tokens", asked=asked))
    return [PlainAnswer(*each) for each in found]


def prompts_of(lengths: Sequence[int], seed: int, vocabulary_tokens: int = 2048) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(10, vocabulary_tokens) for _ in range(n)] for n in lengths]


def serving(
    folder: Path,
    state_dir: Path,
    checkpoint: Path,
    workers: int = 1,
    parameters: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`workers` prefill and as many decode workers. `parameters`: further ones of each worker."""
    further = {
        "engine": "vllm",
        "engine_python": str(PYTHON),
        "vllm_options": '{\\"enforce_eager\\": true}',
        **(parameters or {}),
    }

    def prepare(repository: Path) -> None:
        for path in repository.glob("*_?/config.pbtxt"):
            for name, value in further.items():
                set_parameter(repository, path.parent.name, name, value)
        # The measured cost of a prompt may be 0 with so small a model. The policy `adaptive` would
        # then never fetch.
        set_parameter(repository, "conductor", "policy", "kvcache_centric")
        set_parameter(repository, "conductor", "fetch_must_pay", "false")

    counts = [f"--prefill={workers}", f"--decode={workers}"]
    arguments = [f"--checkpoint={checkpoint}", "--dtype=float32", *counts]
    yield from running(folder, state_dir, {}, arguments, prepare=prepare)
