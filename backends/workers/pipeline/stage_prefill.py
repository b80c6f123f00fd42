"""Common driver of all pipeline stages: an engine with a share of the layers, and its speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from backends.config_pbtxt import PrefillConfig
from backends.engine.interface import Work
from backends.engine.torch.step_plan import rounded_rows
from backends.engine.torch.torch_engine import TorchEngine
from backends.workers.driver import Samples
from backends.workers.step_driver import StepPrefill

FRAMING_BYTES = 2**20  # upper bound of a message's size without its hidden states


class _Rehearsal:
    """Adapter with the interface of an `Engine`, to measure a stage's layers alone."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.pages, self.layout = engine.pages, engine.layout
        self.context_tokens_max = engine.context_tokens_max
        self.vocabulary_tokens = engine.vocabulary_tokens

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> np.ndarray:
        engine, hidden = self.engine, None
        if engine.layers.first > 0:
            tokens = sum(len(work.token_ids) for work in batch)
            rows = tokens if tokens == len(batch) else rounded_rows(tokens)
            hidden = np.zeros(rows * engine.hidden_bytes, np.uint8)
        is_last = engine.layers.stop == engine.layout.layers
        return (engine.forward_last if is_last else engine.forward_stage)(batch, hidden, on_layer)


class StagePrefill(StepPrefill):
    engine: TorchEngine

    def __init__(self, engine: TorchEngine, config: PrefillConfig) -> None:
        super().__init__(engine)
        self.config = config

    @property
    def message_bytes_max(self) -> int:
        # Hidden states of the longest step. The engine rounds their rows up as here.
        rows = rounded_rows(self.config.chunk_tokens)
        return rows * self.engine.hidden_bytes + FRAMING_BYTES

    def measure(self, budget_s: float) -> Samples:
        return self._measure(_Rehearsal(self.engine), budget_s)  # type: ignore[arg-type]
