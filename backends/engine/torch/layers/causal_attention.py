"""Causal attention of one prompt chunk over its context: by torch, or in tiles (CPU, float32).

torch's fused CPU attention multiplies with MKL (onednn.py says what that costs on AMD) and scores
masked positions too. Here tiles of queries meet only the context they may see: scores by oneDNN,
softmax, values by oneDNN. Measured on one EPYC core, 8 heads of 32, 512 queries: 1.0 ns per score
instead of 1.7 at 4,096 tokens of context, 1.6 ms instead of 3.3 without context; the floor is
about 0.9 (0.5 for the two products at 250 GFLOP/s, 0.4 for the exponentials).

Not here: the general case (grouped_attention.py), pages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention.bias import causal_lower_right

from backends.engine.torch import onednn
from backends.engine.torch.step_plan import CONTEXT_STEP_TOKENS, rounded_up

# With less to do, the calls per tile cost more than they save: even at 128 queries, 8 heads and no
# context before them, or at 16 queries and 1,024 tokens.
QUERIES_MIN = 32
SCORES_MIN = 128 * 128 * 8
TILE_ROWS = 256  # rows of scores (queries x heads that share a KV head) at once: fits the L2 cache

# Of a mask that is written out, where torch has no kernel that knows which corner is cut: 32 MiB,
# where that of 8,192 queries and 32,768 tokens would have 256, or 512 in bfloat16.
MASK_SCALARS_MAX = 32 * 2**20


def serves(queries: torch.Tensor, context_tokens: int) -> bool:
    """Worth using for these queries [tokens, heads, head_dim]."""
    tokens, heads, _ = queries.shape
    is_large = tokens >= QUERIES_MIN and tokens * heads * context_tokens >= SCORES_MIN
    return is_large and queries.dtype == torch.float32 and onednn.serves(queries)


def causal_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    out: torch.Tensor,
) -> None:
    """queries [n, kv_heads, shared, D] of the tokens start.. of a request -> out, the same shape
    with the values' D.

    keys and values [kv_heads, context, D each]; the context is `start + n`, rounded up to whole
    CONTEXT_STEP_TOKENS with anything finite.
    """
    tokens, kv_heads, shared, head_dim = queries.shape
    rows = (queries * head_dim**-0.5).transpose(0, 1).reshape(kv_heads, tokens * shared, head_dim)
    tile = max(1, min(TILE_ROWS // shared, 1 << (tokens.bit_length() - 1)))
    # Row r of a tile is query r // shared: it must not see what comes after it.
    later = torch.full((tile, tile + CONTEXT_STEP_TOKENS), -torch.inf).triu_(1)
    later = later.repeat_interleave(shared, 0)
    for kv_head in range(kv_heads):
        for first, last in _tiles(tokens, tile):
            end = rounded_up(start + last, CONTEXT_STEP_TOKENS)
            own = slice(first * shared, last * shared)
            scores = onednn.product(rows[kv_head, own], keys[kv_head, :end])
            own_scores = scores[:, start + first :]
            own_scores.add_(later[: len(own_scores), : own_scores.shape[1]])
            seen = onednn.product(torch.softmax(scores, dim=-1), values[kv_head, :end].t())
            out[first:last, kv_head] = seen.view(last - first, shared, -1)


def by_torch(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, out: torch.Tensor
) -> None:
    """The same by torch's fused kernels, of any device and dtype; the context may be longer.

    Without context there is only a flag. With it, a GPU's kernels know that the last query sees the
    last key; a CPU's need a mask, which is never larger than MASK_SCALARS_MAX at a time.
    """
    tokens, kv_heads, shared, head_dim = queries.shape
    end = start + tokens
    # KV heads are the batch, query heads of one KV head the heads (K and V with stride 0).
    rows, target = queries.permute(1, 2, 0, 3), out.permute(1, 2, 0, 3)
    shape = (kv_heads, shared, end, head_dim)
    keys = keys[:, :end].unsqueeze(1).expand(shape)
    values = values[:, :end].unsqueeze(1).expand(*shape[:-1], values.shape[-1])
    if start == 0:
        target.copy_(F.scaled_dot_product_attention(rows, keys, values, is_causal=True))
        return
    has_kernel = _knows_lower_right(rows, keys, values)
    step = tokens if has_kernel else max(1, MASK_SCALARS_MAX // end)
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        seen = start + last
        mask = causal_lower_right(last - first, seen)
        target[:, :, first:last] = F.scaled_dot_product_attention(
            rows[:, :, first:last],
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=mask if has_kernel else mask._materialize(rows.device),
        )


def _knows_lower_right(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """torch has a kernel for them that needs no mask: what CausalBias itself asks."""
    if not queries.is_cuda:
        return False
    asked = SDPAParams(queries, keys, values, None, 0.0, False, False)
    return can_use_flash_attention(asked) or can_use_efficient_attention(asked)


def _tiles(tokens: int, tile: int) -> list[tuple[int, int]]:
    """Ranges that cover all tokens, all of one size: the last one goes back over its neighbour.

    A part of a tile would be another shape, and oneDNN compiles for each (see rounded_rows).
    """
    firsts = [*range(0, tokens - tile, tile), max(0, tokens - tile)]
    return [(first, min(first + tile, tokens)) for first in firsts]
