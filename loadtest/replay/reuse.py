"""The hits of an unlimited prefix cache: the ideal that a run is compared with.

Pure: requests in order of arrival in, cached tokens out. The rule is that of every worker here:
`cached_tokens = min(full hit blocks x block_tokens, prompt - 1)`.

The ideal ignores time: blocks count as reusable when their request arrives. A server can stay a
little below it when two requests with one prefix arrive together. It exceeds the ideal only if its
cache was not empty at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from loadtest.replay.prompts import TokenIds
from loadtest.results.metrics import COMPLETED, RequestRecord
from mooncake_store.block_keys import block_keys, chain_seed

IDEAL_SEED = chain_seed("loadtest")  # any one seed: block keys are compared only with each other


class UnlimitedCache:
    """Every full block ever seen; nothing is evicted."""

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens > 0, f"block_tokens {block_tokens} must be positive"
        self.block_tokens = block_tokens
        self._seen: set[bytes] = set()

    def admit(self, prompt_ids: TokenIds) -> int:
        """The cached tokens of this prompt; its blocks are cached from now on."""
        keys = block_keys(prompt_ids, self.block_tokens, IDEAL_SEED)
        hit_blocks = leading_hits(keys, self._seen)
        self._seen.update(keys)
        return min(hit_blocks * self.block_tokens, len(prompt_ids) - 1)


def ideal_cached_tokens(prompts: Iterable[TokenIds], block_tokens: int) -> list[int]:
    cache = UnlimitedCache(block_tokens)
    return [cache.admit(prompt) for prompt in prompts]


def ideal_of_completed(
    records: Iterable[RequestRecord], prompt_of: Callable[[int], TokenIds], block_tokens: int
) -> dict[int, int]:
    """Index of each completed request -> its cached tokens with an unlimited cache."""
    done = sorted(record.index for record in records if record.outcome == COMPLETED)
    return dict(zip(done, ideal_cached_tokens(map(prompt_of, done), block_tokens), strict=True))


def leading_hits(keys: Sequence[Hashable], seen: set[Hashable] | set[bytes]) -> int:
    """The number of leading keys in `seen`. With chained block keys this is the reusable prefix."""
    for hits, key in enumerate(keys):
        if key not in seen:
            return hits
    return len(keys)
