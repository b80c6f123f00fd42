"""A prompt through a pipeline group: workers that each have a share of the layers.

While the second stage computes the first chunk of a prompt, the first one computes the second
chunk. A stage begins a chunk when it has done with the one before and the chunk has come to it, so
with stages that are alike, and chunks that get longer because more lies before them,

    prefill = work + fill
    work    the sum over all chunks of the slowest stage's time; then the next prompt may begin
    fill    the other stages' time for the last chunk, and a hop to each of them

What waits in front of a request drains at the pace of `work`: the fill of each prompt hides behind
the next one. A short prompt is one chunk, which the stages compute one after the other: it takes
as long as on a worker that has all layers, and the hops.

A last chunk that is not full is taken for a full one, the `chunk_tokens` before the end of the
prompt: the full one before it keeps the other stages busy until then. A worker that has all layers
is a group of one: nothing to fill.

Not here: who belongs to a group (load/pipeline_groups.py), all groups at once (prefill_pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from conductor.estimates.estimates import PrefillEstimate


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    slowest: PrefillEstimate  # the stage that sets the pace
    others: PrefillEstimate  # all other stages together
    chunk_tokens: int  # of a step; 0: not known, a prompt is one chunk
    hops_s: float  # all of them: hidden states from each stage to the next

    @classmethod
    def of(
        cls, stages: Sequence[PrefillEstimate], chunk_tokens: int = 0, hops_s: float = 0.0
    ) -> PipelineEstimate:
        """Of these stages; at least one. The slowest is the one for a chunk without a prefix."""
        slowest = max(stages, key=partial(_chunk_s, chunk_tokens))
        sums = (sum(parts) for parts in zip(*(stage.coefficients for stage in stages), strict=True))
        others = (
            max(0.0, whole - part) for whole, part in zip(sums, slowest.coefficients, strict=True)
        )
        return cls(slowest, PrefillEstimate(*others), chunk_tokens, hops_s)

    def work_s(self, new_tokens: float, prefix_tokens: float) -> float:
        """How long the next prompt waits for this one."""
        return self.slowest.seconds(new_tokens, prefix_tokens)

    def fill_s(self, new_tokens: float, prefix_tokens: float) -> float:
        """How long after `work_s` its first token comes."""
        if new_tokens <= 0:
            return 0.0
        last_tokens = min(new_tokens, self.chunk_tokens) if self.chunk_tokens else new_tokens
        behind_tokens = prefix_tokens + new_tokens - last_tokens
        return self.hops_s + self.others.seconds(last_tokens, behind_tokens)

    def seconds(self, new_tokens: float, prefix_tokens: float) -> float:
        """From the first chunk's begin to the first token, with nobody else there."""
        return self.work_s(new_tokens, prefix_tokens) + self.fill_s(new_tokens, prefix_tokens)


def _chunk_s(chunk_tokens: int, stage: PrefillEstimate) -> float:
    return stage.seconds(chunk_tokens or 1, 0)
