"""Penalties of an answer that was cut and continued equal those of the uncut answer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from backends.engine.sampling import adjusted_logits
from backends.engine.sampling_params import SamplingParams
from backends.engine.vllm.given_tokens import GivenPenalty, before_repetition

VOCABULARY = 40
PENALTIES = [(0.0, 0.7), (0.6, 0.0), (0.6, 0.7), (-1.5, 2.0), (2.0, -1.0)]


def of_vllm(
    logits: torch.Tensor, seen: set[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    """vLLM's own penalties: repetition for the prompt and its output, the others for its output."""
    scores = logits.clone()
    for token in seen:
        value = scores[token]
        penalty = params.repetition_penalty
        scores[token] = value / penalty if value > 0 else value * penalty
    for token in set(output):
        count = output.count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.8])
@pytest.mark.parametrize(("frequency", "presence"), PENALTIES)
def test_every_cut_of_an_answer_has_the_logits_of_the_uncut_answer(
    frequency: float, presence: float, repetition: float
) -> None:
    rng = random.Random(17)
    params = SamplingParams(
        max_tokens=99,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
    )
    for _ in range(30):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 12))]
        answer = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 25))]
        cut = rng.randrange(1, len(answer) + 1)
        output: list[int] = []
        penalty = GivenPenalty(answer[:cut], output, frequency, presence)
        ids = torch.tensor(penalty.token_ids)
        for length in range(cut, len(answer) + 1):
            output[:] = answer[cut:length]
            logits = torch.tensor([rng.gauss(0, 4) for _ in range(VOCABULARY)])
            logits[rng.randrange(VOCABULARY)] = float("-inf")
            penalty.repeated()
            lowered = logits.clone()
            subtracted = torch.tensor(penalty.subtracted)
            lowered[ids] = before_repetition(logits[ids], subtracted, repetition)
            found = of_vllm(lowered, {*prompt, *answer[:length]}, output, params)
            expected = adjusted_logits(logits.numpy(), params, length, prompt, answer[:length])
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_token_that_vllm_does_not_know_yet_is_read_later() -> None:
    output = [5, -1]
    penalty = GivenPenalty([5, 7, 7], output, 0.5, 1.0)
    assert penalty.subtracted == [1.5, 2.0]
    assert penalty.repeated() == [0]
    assert penalty.subtracted == [0.5, 2.0]
    output[1] = 7
    assert penalty.repeated() == [1]
    assert penalty.subtracted == [0.5, 1.0]
    assert penalty.repeated() == []
