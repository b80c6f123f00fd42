"""Seconds from measured coefficients: those that a worker publishes, and `mooncake profile` writes.

    prefill   base + per_token * new + per_token_pair * new * (there + new / 2)
    decode    base + per_sequence * sequences + per_context_token * context

`base` of a prefill is paid once a step, however many chunks share it. A mixed step is a prefill and
a decode step in one: the greater of the two bases is paid. Not here: fitting (conductor/estimates).
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.estimates.estimates import DecodeEstimate, PrefillEstimate
from loadtest.simulator.gpu.steps import Span, Tokens


class Table:
    """A GpuModel (steps.py) of one worker, from the coefficients of WorkerInfo."""

    def __init__(
        self,
        prefill_coefficients: Sequence[float],
        decode_coefficients: Sequence[float],
        token_bytes: int,
        pages_bytes: int,
    ) -> None:
        self._prefill = PrefillEstimate.of(prefill_coefficients)
        self._decode = DecodeEstimate.of(decode_coefficients)
        self.token_bytes, self.pages_bytes = token_bytes, pages_bytes

    def prefill_s(self, spans: Sequence[Span]) -> float:
        estimate, base_s = self._prefill, self._prefill.base_s
        return base_s + sum(estimate.seconds(new, there) - base_s for there, new in spans)

    def decode_s(self, sequences: int, context_tokens: Tokens) -> Tokens:
        decode = self._decode
        fixed_s = decode.base_s + decode.per_sequence_s * sequences
        return fixed_s + decode.per_context_token_s * context_tokens

    def mixed_s(self, spans: Sequence[Span], sequences: int, context_tokens: float) -> float:
        bases_s = [self._prefill.base_s] * bool(spans) + [self._decode.base_s] * bool(sequences)
        prefill_s = self.prefill_s(spans) - self._prefill.base_s
        decode_s = self.decode_s(sequences, context_tokens) - self._decode.base_s
        return max(bases_s, default=0.0) + prefill_s + decode_s
