"""Multi-head latent attention over paged latents: DeepSeek-V3, Kimi K2.

A page holds one row per token: the token's normed latent, and one rotated key for all heads. K and
V of each head are projections of the latent. There are two forms of the same attention:

    absorbed   Projects the query into the latent space, averages latents, then projects the average
               to V. Reads one row per token for all heads. Used for query tokens and short chunks
    expanded   Projects the latents of the context to K and V. Multiplies less per score, so it is
               faster for chunks of at least `_expanded_from` tokens

weights.py folds the weights of the two latents' norms and YaRN's score factor into matrices. It
also reorders the rotary rows of interleaved checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backends.engine.model_config import LatentConfig
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.layers import causal_attention
from backends.engine.torch.layers.norm import RmsNorm
from backends.engine.torch.layers.paged_attention import LayerStep, PagedAttention
from backends.engine.torch.linear import Linear
from backends.engine.torch.rope import rotate_in_place
from backends.engine.torch.step_plan import PrefillSpan, QueryGroup

INNER_EPSILON = 1e-6  # of the latents' norms; rms_norm_eps of config.json is for the other norms
EXPANDED_SCALARS_MAX = 32 * 2**20  # scalars of expanded K and V in memory at a time


@dataclass(frozen=True, slots=True)
class LatentWeights:
    into: Linear  # hidden -> query's latent (if `query` is None: the query), latent, rotary key
    query: Linear | None  # query's latent -> heads of q; None: queries have no latent
    keys: torch.Tensor  # [heads, plain_dim, rank]
    values: torch.Tensor  # [heads, value_dim, rank]


Step = LayerStep[LatentWeights]


class LatentAttention(PagedAttention[LatentWeights]):
    def __init__(
        self, memory: KvMemory, heads: int, latent: LatentConfig, rope: torch.Tensor
    ) -> None:
        super().__init__(memory, heads, latent.value_dim, rope)
        assert memory.layout.rows == 1 and memory.layout.head_dim == latent.row, memory.layout
        self._latent = latent
        self._norm = RmsNorm(INNER_EPSILON, rope)
        self._scale = latent.query_dim**-0.5
        # Multiplications per score and head in each form, and per context token and head for the
        # expansion. Chunks of at least `_expanded_from` tokens are expanded; None: all chunks.
        absorbed = latent.row + latent.rank
        expanded = latent.query_dim + latent.value_dim
        projected = latent.rank * (latent.plain_dim + latent.value_dim)
        self._expanded_from = projected / (absorbed - expanded) if absorbed > expanded else None

    def project(self, step: Step, normed: torch.Tensor) -> torch.Tensor:
        """Rotated queries [rows, heads, query_dim]. Writes latents and rotated keys to pages."""
        latent, layer, angles = self._latent, step.weights, step.angles
        assert angles is not None
        made = layer.into(normed)
        query, row = made[:, : -latent.row], made[:, -latent.row :]
        if layer.query is not None:
            query = layer.query(self._norm(query))
        queries = query.reshape(-1, self.heads, latent.query_dim)
        row = torch.cat([self._norm(row[:, : latent.rank]), row[:, latent.rank :]], dim=1)
        cosines, sines = angles[:, :1], angles[:, 1:]
        rotate_in_place(queries[..., latent.plain_dim :], cosines, sines)
        rotate_in_place(row[:, None, latent.rank :], cosines, sines)
        self.write(step, row[:, None])
        return queries

    def query_tokens(self, step: Step, queries: torch.Tensor) -> torch.Tensor:
        averages = self.by_groups(step, self._absorbed(step.weights, queries))
        return self._values(step.weights, averages)

    def query_group(self, step: Step, group: QueryGroup, rows: torch.Tensor) -> torch.Tensor:
        """rows [sequences, heads, rank + rotary_dim] -> averages [sequences, heads, rank]."""
        [pages] = self.gather(step, group.page_rows, group.sequences)
        seen = pages[:, :, : group.context_tokens]
        return F.scaled_dot_product_attention(
            rows.unsqueeze(1),
            seen,
            seen[..., : self._latent.rank],
            attn_mask=group.mask(rows.dtype),
            scale=self._scale,
        ).squeeze(1)

    def prefill(
        self, step: Step, span: PrefillSpan, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        latent, layer = self._latent, step.weights
        pages = self.gather(step, span.page_rows, 1)[0, 0]  # [1, tokens of the pages, row]
        if self._expanded_from is None or span.tokens >= self._expanded_from:
            self._expand(layer, span, pages[0], queries, out)
            return
        # `by_torch` divides scores by sqrt(row). The factor changes that scale to `_scale`.
        rows = self._absorbed(layer, queries) * (self._scale * latent.row**0.5)
        seen = rows.new_empty(span.tokens, 1, self.heads, latent.rank)
        causal_attention.by_torch(
            rows.unsqueeze(1), pages, pages[..., : latent.rank], span.start, seen
        )
        out.copy_(self._values(layer, seen.squeeze(1)))

    def _expand(
        self,
        layer: LatentWeights,
        span: PrefillSpan,
        pages: torch.Tensor,
        queries: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """The expanded form over pages [tokens, row], a few heads at a time to bound memory."""
        latent = self._latent
        tokens = len(pages)
        latents, rotary = pages[:, : latent.rank], pages[:, latent.rank :]
        target = out.view(span.tokens, self.heads, 1, latent.value_dim)
        at_once = EXPANDED_SCALARS_MAX // (tokens * (latent.query_dim + latent.value_dim))
        at_once = max(1, at_once)
        for first in range(0, self.heads, at_once):
            heads = slice(first, min(first + at_once, self.heads))
            count = heads.stop - first
            keys = pages.new_empty(count, tokens, latent.query_dim)
            keys[..., : latent.plain_dim] = latents @ layer.keys[heads].transpose(1, 2)
            keys[..., latent.plain_dim :] = rotary
            values = latents @ layer.values[heads].transpose(1, 2)
            rows = queries[:, heads].unsqueeze(2)  # [tokens, heads, 1, query_dim]
            causal_attention.attend(rows, keys, values, span.start, target[:, heads])

    def _absorbed(self, layer: LatentWeights, queries: torch.Tensor) -> torch.Tensor:
        """queries [rows, heads, query_dim] -> [rows, heads, rank + rotary_dim] in latent space."""
        plain, rotary = queries.split([self._latent.plain_dim, self._latent.rotary_dim], dim=-1)
        inner = torch.bmm(plain.transpose(0, 1), layer.keys).transpose(0, 1)
        return torch.cat([inner, rotary], dim=-1)

    def _values(self, layer: LatentWeights, averages: torch.Tensor) -> torch.Tensor:
        """averages of latents [rows, heads, rank] -> results [rows, heads * value_dim]."""
        values = torch.bmm(averages.transpose(0, 1), layer.values.transpose(1, 2))
        return values.transpose(0, 1).reshape(len(averages), -1)
