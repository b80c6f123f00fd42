"""Greedy generation by transformers, and how our tokens are compared with it.

Two correct programs add numbers in different orders, so their logits differ in the last bits.
Where the two best logits of the reference are closer than `TIE_LOGITS`, either token is right and
what follows is another text: from there on tokens are left out, counted and reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TIE_LOGITS = 1e-4


@dataclass(frozen=True, slots=True)
class Reference:
    token_ids: list[int]
    compared_tokens: int  # before the first near-tie


@dataclass(slots=True)
class Comparison:
    compared_tokens: int = 0
    excluded_tokens: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, name: str, ours: Sequence[int], reference: Reference) -> None:
        count = reference.compared_tokens
        self.compared_tokens += count
        self.excluded_tokens += len(reference.token_ids) - count
        if list(ours[:count]) != reference.token_ids[:count]:
            self.differences.append(f"{name}: {list(ours)} is not {reference.token_ids}")

    def check(self, excluded_share_max: float = 0.01) -> None:
        total = self.compared_tokens + self.excluded_tokens
        print(f"compared {self.compared_tokens} tokens, excluded {self.excluded_tokens} near-ties")
        assert not self.differences, "\n".join(self.differences)
        assert self.excluded_tokens <= excluded_share_max * total, (self.excluded_tokens, total)


def greedy(
    model: Any,
    prompt_ids: Sequence[int],
    tokens: int,
    cache: Any = None,  # of transformers; None: its default
    tie_logits: float = TIE_LOGITS,
) -> Reference:
    """What transformers generates, never stopping early."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt_ids)]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **({} if cache is None else {"past_key_values": cache}),
        )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    is_tie = (best[:, 0] - best[:, 1] < tie_logits).tolist()
    token_ids = out.sequences[0, len(prompt_ids) :].tolist()
    return Reference(token_ids, is_tie.index(True) if True in is_tie else tokens)
