"""The logits processor for vLLM's model runner V2, on tensors of a CPU. The runner needs a GPU."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams

from backends.engine.vllm.given_tokens import GIVEN
from backends.engine.vllm.logits_processors import GivenTokensV2

VOCABULARY, SLOTS, LENGTH_MAX = 30, 4, 64


def params_of(given: int, frequency: float, presence: float) -> SamplingParams:
    extra = {GIVEN: given} if given else None
    return SamplingParams(frequency_penalty=frequency, presence_penalty=presence, extra_args=extra)


def test_rows_are_lowered_by_what_vllm_leaves_out() -> None:
    rng = random.Random(5)
    tokens = torch.zeros(SLOTS, LENGTH_MAX, dtype=torch.int32)
    prompt_len = np.zeros(SLOTS, np.int32)
    states: Any = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=tokens), prompt_len=SimpleNamespace(np=prompt_len)
    )
    processor = GivenTokensV2(None, states)
    asked = [(3, 4, 0.5, 1.0), (1, 6, 0.0, -0.5), (2, 0, 0.5, 0.5), (0, 5, 1.5, 0.0)]
    for slot, given, frequency, presence in asked:
        prompt_len[slot] = 8
        tokens[slot, :16] = torch.tensor([rng.randrange(VOCABULARY) for _ in range(16)])
        changes = processor.add_request(slot, params_of(given, frequency, presence))
        assert changes == bool(given)
    processor.apply_staged_writes()
    for outputs in range(6):
        logits = torch.randn(SLOTS, VOCABULARY)
        found = processor.apply(
            logits.clone(),
            SimpleNamespace(
                idx_mapping_np=np.array([slot for slot, *_ in asked]),
                seq_lens_upper_bound_np=np.full(SLOTS, 8 + outputs),
            ),
        )
        for row, (slot, given, frequency, presence) in enumerate(asked):
            ids = tokens[slot, 8 - given : 8].tolist()
            output = tokens[slot, 8 : 8 + outputs].tolist()
            for token in set(ids):
                logits[row, token] -= frequency * ids.count(token)
                logits[row, token] -= presence * (token not in output)
        torch.testing.assert_close(found, logits)


def test_a_reused_slot_forgets_its_request() -> None:
    states: Any = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=torch.ones(1, 8, dtype=torch.int32)),
        prompt_len=SimpleNamespace(np=np.array([4])),
    )
    processor = GivenTokensV2(None, states)
    assert processor.add_request(0, params_of(2, 1.0, 1.0))
    processor.apply_staged_writes()
    assert not processor.add_request(0, params_of(0, 1.0, 1.0))
    logits = torch.zeros(1, VOCABULARY)
    context = SimpleNamespace(idx_mapping_np=np.array([0]), seq_lens_upper_bound_np=np.array([5]))
    assert processor.apply(logits, context).any() == torch.tensor(False)
