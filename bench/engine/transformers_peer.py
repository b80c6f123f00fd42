"""transformers with the same checkpoint, dtype and threads: prefill, `generate`, `generate_batch`.

Each runs with its usual settings: attention by torch's fused function, a growing cache, greedy
tokens. Times between tokens are medians of one call's steps, without the prompt's own time.

Not here: the comparisons (__main__.py).
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadtest.harness.server import CannotMeasure

PAGE_TOKENS = 256
BATCH_TOKENS_MAX = 2_048  # of a step of continuous batching: it affects prompts only


class Transformers:
    def __init__(self, checkpoint: Path, dtype: str) -> None:
        try:
            import transformers
        except ImportError as error:
            raise CannotMeasure("transformers is missing: pip install transformers") from error
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._library: Any = transformers
        self.version = str(transformers.__version__)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def prefill_s(self, prompt: list[int]) -> float:
        """Logits of the last token, and the cache, of a whole prompt."""
        token_ids = torch.tensor([prompt])
        started_s = time.perf_counter()
        self._model(token_ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started_s

    @torch.inference_mode()
    def generate_s(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds from token to token of `generate`."""
        times_s: list[float] = []

        class Clock(self._library.StoppingCriteria):  # type: ignore[misc, name-defined]
            def __call__(self, token_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
                times_s.append(time.perf_counter())
                return torch.zeros(len(token_ids), dtype=torch.bool)

        token_ids = torch.tensor(prompts)
        self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            generation_config=self._greedy(steps),
            stopping_criteria=self._library.StoppingCriteriaList([Clock()]),
        )
        return statistics.median(np.diff(times_s))

    def generate_batch_s(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds from token to token of continuous batching, once all prompts are computed."""
        pages = sum(-(-(len(prompt) + steps) // PAGE_TOKENS) for prompt in prompts)
        config = self._library.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=pages + len(prompts),
            max_batch_tokens=BATCH_TOKENS_MAX,
            allow_block_sharing=False,
        )
        with contextlib.redirect_stderr(io.StringIO()):
            outputs = self._model.generate_batch(
                prompts,
                generation_config=self._greedy(steps + len(prompts)),
                continuous_batching_config=config,
                record_timestamps=True,
            )
        # All steps of the prompt that came last are with all the others.
        last = max(outputs.values(), key=lambda output: output.timestamps[0])
        return statistics.median(np.diff(last.timestamps[1 : steps + 1]))

    def _greedy(self, tokens: int) -> Any:
        return self._library.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
