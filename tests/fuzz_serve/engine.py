"""The engine of the simulated workers, and what every right answer is.

The KV of a token is eight bytes per layer that follow from the whole prefix; the next token follows
from all of them as they lie in the pages, as attention would have it. So one wrong or stale block
anywhere gives another token, as in real greedy decoding.

Not here: who computes when (backends/workers/, which run as they are).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from backends.engine.batching.pages import PagePool
from backends.engine.interface import Work
from mooncake_store.layout import KvLayout, LayerRange
from tests.fuzz_serve.green import sleep

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=1, dtype="float32", block_tokens=4)
VOCABULARY = 250
CONTEXT_TOKENS = 64
PAGES = 48
WORDS = LAYOUT.block_bytes // 8  # of a page: the KV of a token has eight bytes in each layer
MODULUS = 2**61 - 1


def token_kv(before: int, token_id: int, layer: int) -> int:
    """From the KV of the token before, which stands for the whole prefix."""
    return (before * 1_000_003 + token_id * 7_368_787 + layer + 12_345) % MODULUS or 1


def next_token(kv: Iterable[int]) -> int:
    """Greedy: by the KV of all tokens, first one layer, then the other."""
    mixed = 0
    for value in kv:
        mixed = (mixed * 31 + value) % MODULUS
    return mixed % VOCABULARY


def answer_of(prompt: Sequence[int], tokens: int) -> list[int]:
    """What every undisturbed run answers."""
    kv: list[list[int]] = [[], []]
    found: list[int] = []
    for token_id in prompt:
        _extend(kv, token_id)
    for _ in range(tokens):
        found.append(next_token(chain(*kv)))
        _extend(kv, found[-1])
    return found


def blocks_of(token_ids: Sequence[int]) -> list[bytes]:
    """The bytes of every whole block of these tokens."""
    kv: list[list[int]] = [[], []]
    for token_id in token_ids:
        _extend(kv, token_id)
    size = LAYOUT.block_tokens
    starts = range(0, len(token_ids) - size + 1, size)
    return [np.array([of[start : start + size] for of in kv], "<u8").tobytes() for start in starts]


def _extend(kv: list[list[int]], token_id: int) -> None:
    for layer, of in enumerate(kv):
        of.append(token_kv(of[-1] if of else 0, token_id, layer))


class GreenEngine:
    """As backends.engine.interface.Engine. A step takes time, in which others run."""

    layout = LAYOUT
    layers = LayerRange(0, LAYOUT.layers)
    vocabulary_tokens = VOCABULARY
    context_tokens_max = CONTEXT_TOKENS
    model_id, weights_id, tp_shape = "model", "weights", "tp1"
    eos_token_ids: tuple[int, ...] = ()
    rings = None  # prompts pass chunk by chunk

    def __init__(self, step_s: float, token_s: float) -> None:
        self.pages = PagePool(PAGES)
        self.kv_pool = np.zeros(PAGES * LAYOUT.block_bytes, np.uint8)
        self._kv = self.kv_pool.view("<u8")
        self._step_s, self._token_s = step_s, token_s

    def import_pages(self, pages: Sequence[int]) -> None: ...

    def export_pages(self, pages: Sequence[int]) -> None: ...

    def close(self) -> None: ...

    def _words(self, work: Work, layer: int) -> list[int]:
        """Where in the pool the KV of each token of this layer is."""
        tokens = LAYOUT.block_tokens
        return [
            work.pages[index // tokens] * WORDS + layer * tokens + index % tokens
            for index in range(work.end)
        ]

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> np.ndarray:
        new = sum(len(work.token_ids) for work in batch)
        pause_s = (self._step_s + self._token_s * new) / LAYOUT.layers
        kv, logits = self._kv, np.zeros((len(batch), VOCABULARY), np.float32)
        words = [[self._words(work, layer) for layer in range(LAYOUT.layers)] for work in batch]
        for layer in range(LAYOUT.layers):
            sleep(pause_s)
            for work, (*_, at) in zip(batch, (of[: layer + 1] for of in words), strict=True):
                before = int(kv[at[work.start - 1]]) if work.start else 0
                for index, token_id in enumerate(work.token_ids, work.start):
                    before = token_kv(before, token_id, layer)
                    kv[at[index]] = before
            if on_layer is not None:
                on_layer(layer)
        for row, of in enumerate(words):
            logits[row, next_token(kv[of[0] + of[1]].tolist())] = 1.0
        return logits


class LetterTokens:
    """token_bytes.TokenBytes: each token is one letter."""

    def has_text(self, token_id: int) -> bool:
        return True

    def of(self, context_ids: Sequence[int], token_id: int) -> bytes:
        return bytes([97 + token_id % 26])

    def ending(self, context_ids: Sequence[int]) -> bytes:
        return b""


class GreenTokenizer:
    """In place of text.tokenizer.Tokenizer, for prompts that come as tokens."""

    vocabulary_tokens = VOCABULARY
    eos_ids: tuple[int, ...] = ()
    token_bytes = LetterTokens()

    @classmethod
    def load(cls, folder: Any) -> GreenTokenizer:
        return cls()
