"""Causal attention of one prompt chunk over its context: by torch, or in tiles (CPU, float32).

torch's fused CPU attention multiplies with MKL, which is slow on AMD (onednn.py). It also computes
the scores of masked positions. The tiled attention computes only the visible context of each tile
of queries: scores by oneDNN, softmax by torch, averages of V by oneDNN.

Measured on one EPYC core, 8 heads of size 32, 512 queries. After 4,096 earlier tokens a score takes
1.0 ns, and 1.7 ns by torch. Without earlier tokens the chunk takes 1.6 ms, and 3.3 ms by torch. The
lower bound is about 0.9 ns per score: 0.5 ns for two products at 250 GFLOP/s, 0.4 ns for the
exponentials.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from backends.engine.torch import onednn
from backends.engine.torch.step_plan import CONTEXT_STEP_TOKENS, rounded_up

# Smaller chunks are faster by torch. Measured break-even with 8 heads: 128 queries without earlier
# tokens, or 16 queries after 1,024 tokens.
QUERIES_MIN = 32
SCORES_MIN = 128 * 128 * 8
TILE_ROWS = 256  # rows of scores (queries x heads per KV head) in a tile; fits into the L2 cache

# Largest materialised mask of booleans (32 MiB), where torch has no kernel for a lower-right causal
# mask. The mask of 8,192 queries and 32,768 tokens would have 256 MiB, or 512 MiB in bfloat16.
MASK_SCALARS_MAX = 32 * 2**20


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, out: torch.Tensor
) -> None:
    """Calls the faster of `in_tiles` and `by_torch`."""
    tokens, kv_heads, shared, _ = queries.shape
    scores = tokens * kv_heads * shared * (start + tokens)
    is_large = tokens >= QUERIES_MIN and scores >= SCORES_MIN
    is_fast = is_large and queries.dtype == torch.float32 and onednn.serves(queries)
    (in_tiles if is_fast else by_torch)(queries, keys, values, start, out)


def in_tiles(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, out: torch.Tensor
) -> None:
    """queries [n, kv_heads, shared, D] of one sequence, from token `start` on -> out.

    keys [kv_heads, context, D], values [kv_heads, context, E], out [n, kv_heads, shared, E].
    `context` is `start + n`, rounded up to a multiple of CONTEXT_STEP_TOKENS with finite values.
    """
    tokens, kv_heads, shared, head_dim = queries.shape
    rows = (queries * head_dim**-0.5).transpose(0, 1).reshape(kv_heads, tokens * shared, head_dim)
    tile = max(1, min(TILE_ROWS // shared, 1 << (tokens.bit_length() - 1)))
    # Row r of a tile belongs to query r // shared. Mask the tokens after this query.
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
    """Like `in_tiles`, by torch's fused kernels, for any device and dtype, and any `context`.

    With `start` 0, torch's causal flag is enough. Otherwise the mask is causal and aligned to the
    lower right. Kernels that lack it get materialised masks of at most MASK_SCALARS_MAX scalars.
    """
    tokens, kv_heads, shared, head_dim = queries.shape
    end = start + tokens
    # torch's batch dimension: KV heads. torch's heads: query heads of a KV head, K and V expanded.
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
        target[:, :, first:last] = F.scaled_dot_product_attention(
            rows[:, :, first:last],
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=_lower_right(last - first, seen, rows.device, has_kernel),
        )


def _knows_lower_right(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether torch has a kernel with a lower-right mask; the condition of torch's CausalBias."""
    if not queries.is_cuda:
        return False
    asked = SDPAParams(queries, keys, values, None, 0.0, False, False)
    return can_use_flash_attention(asked) or can_use_efficient_attention(asked)


def _lower_right(
    queries: int, context: int, device: torch.device, has_kernel: bool
) -> torch.Tensor:
    """The causal mask [queries, context], aligned to the lower right: for torch's kernel, or as
    booleans."""
    if has_kernel:
        # Imported here, because this import loads torch's compiler: 68 MiB and 2.5 s.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, context)
    ones = torch.ones(queries, context, dtype=torch.bool, device=device)
    return ones.tril_(context - queries)


def _tiles(tokens: int, tile: int) -> list[tuple[int, int]]:
    """Ranges of size `tile` that cover all tokens. The last two ranges may overlap.

    A smaller last tile would be another shape, for which oneDNN compiles (see `rounded_rows`).
    """
    firsts = [*range(0, tokens - tile, tile), max(0, tokens - tile)]
    return [(first, min(first + tile, tokens)) for first in firsts]
