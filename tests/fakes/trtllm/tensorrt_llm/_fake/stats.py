"""What an executor says of an iteration, with the names of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorrt_llm._fake.blocks import BlockManager


def iteration_stats(
    iteration: int,
    active: int,
    waiting: int,
    completed: int,
    batch_max: int,
    blocks: BlockManager,
    contexts: Sequence[int],
    batch: int,
) -> dict[str, Any]:
    """`contexts`: the tokens that it computes of each prompt."""
    seen = max(1, blocks.reused_blocks + blocks.missed_blocks)
    return {
        "iter": iteration,
        "iterLatencyMS": 0.1,
        "numActiveRequests": active,
        "numQueuedRequests": waiting,
        "numCompletedRequests": completed,
        "maxNumActiveRequests": batch_max,
        "kvCacheStats": {
            "maxNumBlocks": blocks.blocks,
            "freeNumBlocks": blocks.free_blocks,
            "usedNumBlocks": blocks.blocks - blocks.free_blocks,
            "tokensPerBlock": blocks.per_block,
            "allocTotalBlocks": blocks.missed_blocks,
            "allocNewBlocks": blocks.missed_blocks,
            "reusedBlocks": blocks.reused_blocks,
            "missedBlocks": blocks.missed_blocks,
            "cacheHitRate": blocks.reused_blocks / seen,
        },
        "inflightBatchingStats": {
            "numContextRequests": len(contexts),
            "numGenRequests": batch - len(contexts),
            "numPausedRequests": 0,
            "numScheduledRequests": batch,
            "numCtxTokens": sum(contexts),
        },
    }
