"""What each prompt is answered when nothing goes wrong, and where more than one token is right.

Two correct runs add numbers in different orders (another batch, another chunk), so logits differ in
their last bits. Where the two best tokens, or the number that was drawn and the edge between two
tokens, are closer than that, either is right and what follows is another text. Such positions are
found with transformers' own logits of the same answer, which are a second witness that the answer
itself is right.

Not here: requests (streams.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from backends.engine.sampling import distribution, sample, uniform
from backends.engine.sampling_params import SamplingParams
from tests.backends.engine.checkpoints import load_reference
from tests.backends.engine.reference import TIE_LOGITS
from tests.chaos_serve.streams import FINISHED, STREAMS, ChaosPrompt, ask

CHECKPOINT = Path(__file__).resolve().parents[2] / "backends" / "demo_checkpoint"
TIE_SHARE = 2e-5  # of all probability, between the number that was drawn and an edge


@dataclass(frozen=True, slots=True)
class RightAnswer:
    tokens: tuple[int, ...]
    ties: frozenset[int]  # positions at which another token would be right too

    def first_difference(self, tokens: Sequence[int]) -> int | None:
        """From the start to the shorter one's end."""
        pairs = zip(tokens, self.tokens, strict=False)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


def undisturbed_run(
    asked: Sequence[ChaosPrompt], frontends: Mapping[str, str]
) -> dict[int, RightAnswer]:
    """By prompt. Each is asked of every frontend, as many at once as later.

    AssertionError when a request fails or an answer is not right: then nothing can be said.
    """
    answers = asyncio.run(_ask_all(asked, frontends))
    transformers.utils.logging.disable_progress_bar()
    model = load_reference(CHECKPOINT)
    right = {}
    for prompt in asked:
        (first, *others) = answers[prompt.number]
        logits = _logits(model, prompt, first)
        right[prompt.number] = answer = RightAnswer(first, _ties(prompt, first, logits))
        for other in others:
            differs = answer.first_difference(other)
            assert differs is None or differs in answer.ties, (
                f"undisturbed, prompt {prompt.number}: two answers, from token {differs}"
            )
    return right


async def _ask_all(
    asked: Sequence[ChaosPrompt], frontends: Mapping[str, str]
) -> dict[int, list[tuple[int, ...]]]:
    answers: dict[int, list[tuple[int, ...]]] = {prompt.number: [] for prompt in asked}
    slots = asyncio.Semaphore(STREAMS)

    async def one(prompt: ChaosPrompt, host: str) -> None:
        async with slots:
            ended = await ask(prompt, host, frontends[host], f"before-{host}-{prompt.number}")
        assert ended.outcome == FINISHED, f"undisturbed: {ended.outcome}: {ended.message}"
        assert len(ended.tokens) == prompt.max_tokens, (len(ended.tokens), prompt)
        answers[prompt.number].append(ended.tokens)

    for host in sorted(frontends):
        await asyncio.gather(*(one(prompt, host) for prompt in asked))
    return answers


def _logits(
    model: torch.nn.Module, prompt: ChaosPrompt, answer: Sequence[int]
) -> NDArray[np.float32]:
    """Of each position of the answer, given what is before it."""
    with torch.inference_mode():
        found = model(torch.tensor([[*prompt.input_ids, *answer[:-1]]])).logits[0]
    return np.asarray(found[len(prompt.input_ids) - 1 :].float().numpy())


def _ties(
    prompt: ChaosPrompt, answer: Sequence[int], logits: NDArray[np.float32]
) -> frozenset[int]:
    """AssertionError when the answer is another one than transformers'."""
    params = prompt.sampling()
    ties = frozenset(at for at, each in enumerate(logits) if is_tie(each, params, at))
    for at, each in enumerate(logits):
        wanted = sample(each, params, at, prompt.input_ids, answer[:at])
        assert wanted == answer[at] or at in ties, (
            f"undisturbed, prompt {prompt.number}: token {at} is {answer[at]}, "
            f"transformers says {wanted}"
        )
    return ties


def is_tie(logits: NDArray[np.float32], params: SamplingParams, position: int) -> bool:
    if params.is_greedy:
        second, best = np.partition(logits, -2)[-2:]
        return bool(best - second < TIE_LOGITS)
    last = len(logits) - params.top_k
    ordered = np.partition(logits, (last - 1, last))
    if ordered[last] - ordered[last - 1] < TIE_LOGITS:  # either may be the last that is drawn from
        return True
    _, probabilities = distribution(logits, params)
    edges = np.cumsum(probabilities)
    return bool(np.abs(edges[:-1] - uniform(params.seed, position) * edges[-1]).min() < TIE_SHARE)
