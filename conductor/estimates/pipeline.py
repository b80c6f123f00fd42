"""Pipeline-parallel prefill time: the slowest stage's time plus a fill time of the other stages.

The stages of a pipeline group each hold a share of the layers. While the second stage computes the
first chunk of a prompt, the first stage computes the second chunk. A stage begins a chunk when it
has finished the previous chunk and has received the hidden states. The formula is exact for equal
stages if later chunks take longer than earlier ones. Otherwise it is an approximation:

    prefill = work + fill
    work    the slowest stage's time for all chunks; after it, the next prompt may begin
    fill    the other stages' time for the last chunk, and the transfers of hidden states (hops)

The queue in front of a request drains at the pace of `work`, since the fill of each prompt overlaps
with the next prompt. A short prompt is one chunk, which the stages compute one after the other. It
takes as long as on a worker with all layers, plus the hops.

If a prompt has several chunks, `fill` counts a shorter last chunk as a full one. When that chunk
arrives at a later stage, the stage is still busy with the full chunk before it. A worker with all
layers is a group of one stage, without any fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from conductor.estimates.estimates import PrefillEstimate


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    slowest: PrefillEstimate  # the pipeline stage that sets the pace
    others: PrefillEstimate  # sum of the other pipeline stages
    chunk_tokens: int  # most new tokens of a chunk; 0 if unknown, so that a prompt is one chunk
    hops_s: float  # total time in which hidden states pass through all stages

    @classmethod
    def of(
        cls, stages: Sequence[PrefillEstimate], chunk_tokens: int = 0, hops_s: float = 0.0
    ) -> PipelineEstimate:
        """The estimate of a group of one or more stages. The slowest stage is the one that takes
        longest for a first chunk, or for one token if `chunk_tokens` is 0."""
        slowest = max(stages, key=partial(_chunk_s, chunk_tokens))
        sums = (sum(parts) for parts in zip(*(stage.coefficients for stage in stages), strict=True))
        others = (
            max(0.0, whole - part) for whole, part in zip(sums, slowest.coefficients, strict=True)
        )
        return cls(slowest, PrefillEstimate(*others), chunk_tokens, hops_s)

    def work_s(self, new_tokens: float, prefix_tokens: float) -> float:
        """Seconds until the next prompt can begin."""
        return self.slowest.seconds(new_tokens, prefix_tokens)

    def fill_s(self, new_tokens: float, prefix_tokens: float) -> float:
        """Seconds from the end of `work_s` to the first token."""
        if new_tokens <= 0:
            return 0.0
        last_tokens = min(new_tokens, self.chunk_tokens) if self.chunk_tokens else new_tokens
        behind_tokens = prefix_tokens + new_tokens - last_tokens
        return self.hops_s + self.others.seconds(last_tokens, behind_tokens)

    def seconds(self, new_tokens: float, prefix_tokens: float) -> float:
        """Seconds from the start of the first chunk to the first token, in an idle group."""
        return self.work_s(new_tokens, prefix_tokens) + self.fill_s(new_tokens, prefix_tokens)


def _chunk_s(chunk_tokens: int, stage: PrefillEstimate) -> float:
    return stage.seconds(chunk_tokens or 1, 0)
