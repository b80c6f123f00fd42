"""What a prefix cache without limits would have given: the ideal that a run is compared with.

Pure: requests in order of arrival in, cached tokens out. A cache of full blocks finds the longest
run of blocks it has seen from the start of the prompt, and at least one token is always computed:
`cached_tokens = min(full hit blocks x block_tokens, prompt - 1)` (the rule of every worker here).

The ideal ignores time: a request counts as reusable the moment it arrived, although its blocks
exist only when its prefill is done. A server can therefore stay a little below it when two requests
with one prefix arrive together, and go above it only if its cache was not empty at the start.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mooncake_store.block_keys import block_keys, chain_seed

IDEAL_SEED = chain_seed("loadtest")  # any one seed: keys are compared only with each other


class UnlimitedCache:
    """Every full block ever seen; nothing is evicted."""

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens > 0, f"block_tokens {block_tokens} must be positive"
        self.block_tokens = block_tokens
        self._seen: set[bytes] = set()

    def admit(
        self, prompt_ids: npt.NDArray[np.int32], output_ids: Sequence[int] | None = None
    ) -> int:
        """The cached tokens of this prompt; its blocks are in the cache from now on.

        With `output_ids`, blocks of the answer as well, as decode workers store them. The last
        token of an answer is never fed back, so it has no KV and completes no block.
        """
        keys = block_keys(prompt_ids, self.block_tokens, IDEAL_SEED)
        hit_blocks = leading_hits(keys, self._seen)
        self._seen.update(keys)
        if output_ids is not None and len(output_ids) > 1:
            sequence = np.concatenate([prompt_ids, np.asarray(output_ids[:-1], dtype=np.int32)])
            self._seen.update(block_keys(sequence, self.block_tokens, IDEAL_SEED))
        return min(hit_blocks * self.block_tokens, len(prompt_ids) - 1)


def ideal_cached_tokens(
    prompts: Iterable[npt.NDArray[np.int32]],
    block_tokens: int,
    outputs: Iterable[Sequence[int]] | None = None,
) -> list[int]:
    """The cached tokens of each prompt, in order of arrival; with `outputs`, answers count too."""
    cache = UnlimitedCache(block_tokens)
    if outputs is None:
        return [cache.admit(prompt) for prompt in prompts]
    return [cache.admit(p, output) for p, output in zip(prompts, outputs, strict=True)]


def leading_hits(keys: Sequence[Hashable], seen: set[Hashable] | set[bytes]) -> int:
    """How many keys from the start are in `seen`. Chained keys make that the reusable prefix."""
    for hits, key in enumerate(keys):
        if key not in seen:
            return hits
    return len(keys)


def block_hits(chains: Iterable[Sequence[Hashable]]) -> tuple[int, int]:
    """(hits, references) of an unlimited cache over whole chains, e.g. the hash ids of a trace."""
    seen: set[Hashable] = set()
    hits = references = 0
    for chain in chains:
        hits += leading_hits(chain, seen)
        references += len(chain)
        seen.update(chain)
    return hits, references
