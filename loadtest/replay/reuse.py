"""What a prefix cache without limits would have given: the ideal that a run is compared with.

Pure: requests in order of arrival in, cached tokens out. A cache of full blocks finds the longest
run of blocks it has seen from the start of the prompt, and at least one token is always computed:
`cached_tokens = min(full hit blocks x block_tokens, prompt - 1)` (the rule of every worker here).

The ideal ignores time: a request counts as reusable the moment it arrived, although its blocks
exist only when its prefill is done. A server can therefore stay a little below it when two requests
with one prefix arrive together, and go above it only if its cache was not empty at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from loadtest.replay.prompts import TokenIds
from loadtest.results.metrics import COMPLETED, RequestRecord
from mooncake_store.block_keys import block_keys, chain_seed

IDEAL_SEED = chain_seed("loadtest")  # any one seed: keys are compared only with each other


class UnlimitedCache:
    """Every full block ever seen; nothing is evicted."""

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens > 0, f"block_tokens {block_tokens} must be positive"
        self.block_tokens = block_tokens
        self._seen: set[bytes] = set()

    def admit(self, prompt_ids: TokenIds) -> int:
        """The cached tokens of this prompt; its blocks are in the cache from now on."""
        keys = block_keys(prompt_ids, self.block_tokens, IDEAL_SEED)
        hit_blocks = leading_hits(keys, self._seen)
        self._seen.update(keys)
        return min(hit_blocks * self.block_tokens, len(prompt_ids) - 1)


def ideal_cached_tokens(prompts: Iterable[TokenIds], block_tokens: int) -> list[int]:
    """The cached tokens of each prompt, in order of arrival."""
    cache = UnlimitedCache(block_tokens)
    return [cache.admit(prompt) for prompt in prompts]


def ideal_of_completed(
    records: Iterable[RequestRecord], prompt_of: Callable[[int], TokenIds], block_tokens: int
) -> dict[int, int]:
    """Index -> cached tokens that an unlimited cache would have given to the completed requests.

    `prompt_of` knows the prompt of each request by its index.
    """
    done = sorted(record.index for record in records if record.outcome == COMPLETED)
    return dict(zip(done, ideal_cached_tokens(map(prompt_of, done), block_tokens), strict=True))


def leading_hits(keys: Sequence[Hashable], seen: set[Hashable] | set[bytes]) -> int:
    """How many keys from the start are in `seen`. Chained keys make that the reusable prefix."""
    for hits, key in enumerate(keys):
        if key not in seen:
            return hits
    return len(keys)
