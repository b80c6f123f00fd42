"""What fails with one request of a batch fails that request, and none of its neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backends.engine.sampling import Drawn, draw
from backends.engine.sampling_params import SamplingParams
from backends.workers import step_driver
from tests.backends.stepped_site import Site, answer_of

BAD_SEED = 13
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_whose_sampling_fails_is_alone_with_it(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(0, monkeypatch)

    def failing(logits: np.ndarray, params: SamplingParams, position: int, *rest: Any) -> Drawn:
        if params.seed == BAD_SEED and (position == 0) == (role == "prefill"):
            raise FloatingPointError("no token has a probability")
        return draw(logits, params, position, *rest)

    monkeypatch.setattr(step_driver, "draw", failing)
    # As in a batch of which one request wants more than its largest logit.
    monkeypatch.setattr(step_driver, "largest_rows", lambda *_: None)
    seeds = (0, BAD_SEED, 0)
    clients = [site.ask(prompt, 6, seed) for prompt, seed in zip(PROMPTS, seeds, strict=True)]
    site.settle()
    assert isinstance(clients[1].error, FloatingPointError)
    for client in (clients[0], clients[2]):
        assert client.error is None, client.error
        assert client.answer == answer_of(client.prompt, 6)
