"""What is compiled of a layer gives what torch's functions give, and can be done without."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from backends.engine.interface import Work
from backends.engine.model_config import RopeConfig
from backends.engine.torch import fp8, native_layers
from backends.engine.torch.rope import rope_table, rotate_in_place
from backends.engine.torch.step_plan import PagesSeen
from backends.engine.torch.torch_engine import TorchEngine
from tests.backends.engine.checkpoints import make_checkpoint

DTYPES = (torch.float32, torch.bfloat16)  # of pages
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # bfloat16: rounded once
ROUNDED_TOLERANCE = 2**-5  # queries rounded to bfloat16, whose scores are about 10
pytestmark = pytest.mark.skipif(
    not native_layers.serves(torch.zeros(1)), reason="no compiler or no AVX-512: torch computes"
)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def close(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert ours.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(ours.float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_a_norm_is_the_rms_norm(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(30):
        rows, width = chance.choice([1, 3, 17, 400]), chance.choice([8, 64, 72, 768])
        values = torch.randn(rows, width + 8)[:, :width] * 3
        weight = chance.choice([None, torch.randn(width)])
        expected = F.rms_norm(values, (width,), None, 1e-5)
        ours = native_layers.norm_rows(values, 1e-5, weight)
        close(ours, expected if weight is None else expected * weight)


def test_a_gate_is_silu_times_up(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(30):
        rows, width = chance.choice([1, 3, 17, 300]), chance.choice([8, 112, 704])
        both = torch.randn(rows, 2 * width) * chance.choice([1, 30])
        gate, up = both.chunk(2, dim=-1)
        close(native_layers.gate_rows(both), F.silu(gate) * up)


def test_heads_are_normed_and_rotated_and_put_into_their_pages(
    dtype: torch.dtype, seed: int
) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(30):
        heads, kv_heads = chance.choice([(1, 1), (4, 2), (12, 4)])
        head_dim, rows = chance.choice([16, 24, 64, 128]), chance.choice([1, 2, 9, 130])
        tokens = chance.randint(1, rows)
        qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim)
        norm = chance.choice([None, torch.randn(heads + kv_heads, head_dim)])
        table = rope_table(RopeConfig(1e4), head_dim, 64, torch.float32, torch.device("cpu"))
        positions = torch.randint(0, 64, (rows,))
        memory = torch.zeros(4 * rows * kv_heads, head_dim, dtype=dtype)
        token_rows = torch.randperm(len(memory))[: tokens * 2 * kv_heads].view(tokens, -1)
        expected, kept = qkv.clone(), memory.float()
        rotated = expected[:, : heads + kv_heads]
        if norm is not None:
            rotated.copy_(F.rms_norm(rotated, (head_dim,), None, 1e-6)).mul_(norm)
        angles = table.index_select(0, positions)
        rotate_in_place(rotated, angles[:, :1], angles[:, 1:])
        kept.index_put_((token_rows,), expected[:tokens, heads:])
        native_layers.rotate_rows(
            qkv, heads, table, positions, norm, 1e-6, memory, token_rows.contiguous()
        )
        close(qkv, expected)
        close(memory, kept, dtype)


@pytest.mark.parametrize("is_every", [True, False], ids=["every bfloat16", "any float32"])
def test_k_and_v_become_the_fp8_that_torch_makes_of_them(is_every: bool, seed: int) -> None:
    head_dim, tokens = 128, 512
    if is_every:
        bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
        numbers = bits.view(torch.bfloat16).float().view(tokens, 1, head_dim)
    else:
        torch.manual_seed(seed)
        bits = torch.randint(-(2**31), 2**31, (tokens * head_dim,)).to(torch.int32)
        numbers = bits.view(torch.float32).view(tokens, 1, head_dim)
        numbers[::2] = torch.randn(numbers[::2].shape) * 2.0 ** torch.randint(-12, 12, (1,))
    qkv = torch.zeros(tokens, 3, head_dim, dtype=numbers.dtype)
    qkv[:, 2:] = numbers
    memory = torch.zeros(2 * tokens, head_dim, dtype=torch.uint8)
    token_rows = torch.randperm(2 * tokens).view(tokens, 2)
    table = torch.ones(1, 2, head_dim, dtype=numbers.dtype)
    positions = torch.zeros(tokens, dtype=torch.int64)
    native_layers.rotate_rows(qkv, 1, table, positions, None, 1e-6, memory, token_rows)
    ours, expected = memory[token_rows[:, 1]], fp8.rounded(numbers[:, 0])
    is_nan = numbers[:, 0].isnan()
    assert torch.equal(ours[~is_nan], expected[~is_nan])
    assert (ours[is_nan] & 0x7F == 0x7F).all()
    assert not (ours[~is_nan] & 0x7F == 0x7F).any(), "nothing overflows to NaN"


def test_every_fp8_is_read_as_the_number_that_it_is() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    is_number = raw & 0x7F != 0x7F
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = fp8.widened(raw, dtype)
        assert torch.equal(found[is_number], raw.view(fp8.DTYPE).to(dtype)[is_number])
        assert found.isfinite().all(), "also of another request's leftovers"


# Threads share out the heads of any format, so two threads are tried with one of the formats.
WAYS = pytest.mark.parametrize(
    ("threads", "is_fp8"),
    [(1, False), (1, True), (2, False), pytest.param(2, True, marks=pytest.mark.long)],
    ids=["1-as it is", "1-fp8", "2-as it is", "2-fp8"],
)


def kept_as(numbers: torch.Tensor, dtype: torch.dtype, is_fp8: bool) -> torch.Tensor:
    """As pages hold them."""
    return fp8.rounded(numbers).view(fp8.DTYPE) if is_fp8 else numbers.to(dtype)


@pytest.mark.slow
@WAYS
def test_attention_reads_its_own_pages_and_nothing_behind_them(
    dtype: torch.dtype, threads: int, is_fp8: bool, seed: int
) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(30):
            kv_heads, shared = chance.choice([1, 2, 4]), chance.choice([1, 2, 3, 4, 5, 7, 8])
            head_dim, block = chance.choice([8, 16, 24, 32, 64, 80, 128]), chance.choice([16, 64])
            contexts = [chance.choice([1, 15, 16, 17, 64, 65, 300]) for _ in range(3)]
            widths = [-(-context // block) for context in contexts]
            memory = torch.full((2 * sum(widths), 2, 2, kv_heads, block, head_dim), torch.nan)
            order = torch.randperm(len(memory))[: sum(widths)].split(widths)
            queries = torch.randn(3, kv_heads * shared + 2, head_dim)[:, 1:-1]
            expected = []
            for query, own, context in zip(queries, order, contexts, strict=True):
                kv = 2 * torch.randn(2, kv_heads, context, head_dim)
                kv = kept_as(kv, dtype, is_fp8).float()
                for place, page in enumerate(own):
                    part = kv[:, :, place * block : (place + 1) * block]
                    memory[page, 1, :, :, : part.shape[2]] = part
                rows = query.view(kv_heads, shared, head_dim)
                seen = F.scaled_dot_product_attention(rows, kv[0], kv[1])
                expected.append(seen.reshape(-1))
            widths_before = np.cumsum([0, *widths[:-1]])
            seen_pages = PagesSeen(
                torch.cat(order).numpy(), widths_before, np.array(contexts), sum(contexts)
            )
            layer = kept_as(memory, dtype, is_fp8)[:, 1]
            ours = native_layers.attend_query_tokens(queries, layer, seen_pages, block)
            close(ours, torch.stack(expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("is_rounded", [False, True], ids=["exact", "rounded"])
def test_attention_of_a_chunk_is_causal_attention(
    threads: int, is_fp8: bool, is_rounded: bool, seed: int
) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            kv_heads, shared = chance.choice([1, 2, 4]), chance.choice([1, 2, 3, 4, 7])
            head_dim, block = chance.choice([64, 128]), chance.choice([16, 64, 256])
            tokens, start = chance.choice([2, 31, 64, 100, 200]), chance.choice([0, 1, 63, 64, 300])
            end = start + tokens
            table = torch.randperm(2 * -(-end // block))[: -(-end // block)]
            kv = 2 * torch.randn(2, kv_heads, end, head_dim)
            kv = kept_as(kv, torch.bfloat16, is_fp8).float()
            memory = torch.full((2 * len(table), 2, 2, kv_heads, block, head_dim), torch.nan)
            for place, page in enumerate(table):
                part = kv[:, :, place * block : (place + 1) * block]
                memory[page, 1, :, :, : part.shape[2]] = part
            memory = kept_as(memory, torch.bfloat16, is_fp8)
            queries = torch.randn(tokens, kv_heads * shared + 2, head_dim)[:, 1:-1]
            is_seen = torch.arange(end)[None, :] <= start + torch.arange(tokens)[:, None]
            expected = F.scaled_dot_product_attention(
                queries.transpose(0, 1),
                kv[0].float().repeat_interleave(shared, 0),
                kv[1].float().repeat_interleave(shared, 0),
                attn_mask=is_seen,
            ).transpose(0, 1)
            ours = torch.full(expected.shape, torch.nan)
            need = native_layers.prefill_scratch(end, kv_heads, head_dim)
            scratch = torch.full((need,), torch.nan, dtype=torch.bfloat16)
            native_layers.attend_prefill(
                queries, memory[:, 1], table.numpy(), start, ours, scratch, is_rounded
            )
            tolerance = ROUNDED_TOLERANCE if is_rounded else TOLERANCES[torch.float32]
            torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    finally:
        torch.set_num_threads(before)


def test_a_head_too_large_for_registers_is_left_to_torch(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, head_dim=144)
    engine = TorchEngine.load(tmp_path, 12, 16)
    assert not engine._transformer.attention.reads_seen
    assert np.isfinite(engine.forward([Work([5, 6, 7], 0, [0])])).all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_engine_does_without_native_code(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path)
    chance = random.Random(3)
    works = [
        Work(chance.choices(range(320), k=tokens), 0, list(range(first, first + 40)))
        for tokens, first in ((600, 0), (40, 40), (1, 80))
    ]
    steps = [Work([7], len(work.token_ids), work.pages) for work in works]
    fast = TorchEngine.load(tmp_path, 120, 16)
    monkeypatch.setattr(native_layers, "serves", lambda tensor: False)
    plain = TorchEngine.load(tmp_path, 120, 16)
    expected, expected_steps = plain.forward(works), plain.forward(steps)
    monkeypatch.undo()
    np.testing.assert_allclose(fast.forward(works), expected, atol=1e-4)
    np.testing.assert_allclose(fast.forward(steps), expected_steps, atol=1e-4)
