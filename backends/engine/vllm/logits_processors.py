"""Logits processors that vLLM loads: penalties for the given tokens (given_tokens.py).

vLLM has two model runners, and a class for each. V1 calls processors before its own penalties, and
V2 after them. V1 is used on CPUs. The class for V2 has not run on a GPU.

Without vLLM this file cannot be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor import interface as v1
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import interface as v2

from backends.engine.vllm.given_tokens import (
    GivenPenalty,
    before_repetition,
    counts_generated,
    given_tokens,
)


class RowPenalty:
    """One row of the batch in runner V1."""

    def __init__(self, penalty: GivenPenalty, repetition: float, device: torch.device) -> None:
        self._penalty, self._repetition = penalty, repetition
        self._token_ids = torch.tensor(penalty.token_ids, dtype=torch.int64, device=device)
        self._subtracted = torch.tensor(penalty.subtracted, dtype=torch.float32, device=device)

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits [vocabulary] of this row."""
        for index in self._penalty.repeated():
            self._subtracted[index] = self._penalty.subtracted[index]
        values = before_repetition(logits[self._token_ids], self._subtracted, self._repetition)
        logits[self._token_ids] = values


class GivenTokensV1(v1.LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, RowPenalty] = {}  # only of requests with penalties and given tokens

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: v1.BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def _row(
        self, params: Any, prompt_ids: Sequence[int] | None, output_ids: Sequence[int]
    ) -> RowPenalty | None:
        given = given_tokens(params)
        if not given or not prompt_ids or not counts_generated(params):
            return None
        frequency, presence = params.frequency_penalty, params.presence_penalty
        penalty = GivenPenalty(prompt_ids[-given:], output_ids, frequency, presence)
        return RowPenalty(penalty, params.repetition_penalty, self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, penalty in self._rows.items():
            penalty.apply(logits[row])
        return logits


class SlotPenalty(NamedTuple):
    """One request slot in runner V2."""

    token_ids: torch.Tensor  # the different given tokens
    frequency: torch.Tensor  # of each: frequency_penalty x count
    presence: float


class GivenTokensV2(v2.LogitsProcessor):
    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states
        self._slots: dict[int, SlotPenalty] = {}  # only of requests with penalties and given tokens
        self._new: dict[int, Any] = {}  # slot -> SamplingParams; its tokens are not there yet

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._slots.pop(req_idx, None)
        self._new.pop(req_idx, None)
        if not given_tokens(sampling_params) or not counts_generated(sampling_params):
            return False
        self._new[req_idx] = sampling_params
        return True

    def apply_staged_writes(self) -> None:
        new, self._new = self._new, {}
        for slot, params in new.items():
            stop = int(self._states.prompt_len.np[slot])
            given = self._states.all_token_ids.gpu[slot, stop - given_tokens(params) : stop]
            token_ids, counts = given.long().unique(return_counts=True)
            frequency = params.frequency_penalty * counts
            self._slots[slot] = SlotPenalty(token_ids, frequency, params.presence_penalty)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Without speculative decoding each request has one row."""
        if not self._slots:
            return logits
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            penalty = self._slots.get(slot)
            if penalty is None:
                continue
            start, stop = self._states.prompt_len.np[slot], ctx.seq_lens_upper_bound_np[row]
            output_ids = self._states.all_token_ids.gpu[slot, int(start) : int(stop)]
            unrepeated = ~torch.isin(penalty.token_ids, output_ids)
            logits[row, penalty.token_ids] -= penalty.frequency + penalty.presence * unrepeated
        return logits


def processor_of(config: Any) -> str:
    """The name of the class for the model runner of this VllmConfig, as vLLM loads it."""
    cls = GivenTokensV2 if config.use_v2_model_runner else GivenTokensV1
    return f"{cls.__module__}:{cls.__name__}"
