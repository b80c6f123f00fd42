"""Causal attention of one prompt chunk over its context, in tiles. CPU, float32.

torch's fused CPU attention multiplies with MKL (onednn.py says what that costs on AMD) and scores
masked positions too. Here tiles of queries meet only the context they may see: scores by oneDNN,
softmax, values by oneDNN. Measured on one EPYC core, 8 heads of 32, 512 queries: 1.0 ns per score
instead of 1.7 at 4,096 tokens of context, 1.6 ms instead of 3.3 without context; the floor is
about 0.9 (0.5 for the two products at 250 GFLOP/s, 0.4 for the exponentials).

Not here: the general case (attention.py), pages.
"""

from __future__ import annotations

import torch

from backends.engine import onednn

QUERIES_MIN = 128  # below it the calls per tile cost more than they save
TILE_ROWS = 256  # rows of scores (queries x heads that share a KV head) at once: fits the L2 cache


def serves(queries: torch.Tensor) -> bool:
    """Worth using for these queries [tokens, heads, head_dim]."""
    return len(queries) >= QUERIES_MIN and onednn.serves(queries)


def causal_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
) -> torch.Tensor:
    """queries [n, heads, D] of the tokens start.. over keys, values [kv_heads, start + n, D].

    Returns [n, heads * D].
    """
    tokens, heads, head_dim = queries.shape
    kv_heads = len(keys)
    shared = heads // kv_heads
    grouped = queries.view(tokens, kv_heads, shared, head_dim)
    rows = (grouped * head_dim**-0.5).transpose(0, 1).reshape(kv_heads, tokens * shared, head_dim)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    tile = max(1, TILE_ROWS // shared)
    # Row r of a tile is query r // shared: it must not see what comes after it in the tile.
    later = torch.full((tile, tile), -torch.inf).triu_(1).repeat_interleave(shared, 0)
    for kv_head in range(kv_heads):
        for first in range(0, tokens, tile):
            last = min(first + tile, tokens)
            end = start + last
            scores = onednn.product(
                rows[kv_head, first * shared : last * shared], keys[kv_head, :end]
            )
            width = last - first
            scores[:, start + first :].add_(later[: width * shared, :width])
            weights = torch.softmax(scores, dim=-1)
            seen = onednn.product(weights, values[kv_head, :end].t())
            out[first:last, kv_head] = seen.view(width, shared, head_dim)
    return out.view(tokens, heads * head_dim)
