"""Shapes of blocks and segments, and fingerprints that refuse by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store.layout import (
    DIGEST_BYTES,
    HEADER_BYTES,
    SLOT_ALIGN_BYTES,
    Geometry,
    KvLayout,
    LayerRange,
    PageLayout,
    blocks_touched,
    describe,
    describe_difference,
    fingerprint,
    geometry,
    memory_bytes_for,
)

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=16)


def test_a_block_is_its_layers_one_after_the_other() -> None:
    assert LAYOUT.layer_bytes == 2 * 2 * 16 * 8 * 2
    assert LAYOUT.block_bytes == 3 * LAYOUT.layer_bytes
    assert LAYOUT.token_bytes * LAYOUT.block_tokens == LAYOUT.block_bytes
    offsets = [LAYOUT.layer_offset_bytes(layer) for layer in range(3)]
    assert offsets == [0, LAYOUT.layer_bytes, 2 * LAYOUT.layer_bytes]


def test_a_latent_block_has_one_row_for_each_token_of_a_layer() -> None:
    latent = KvLayout(3, 1, 576, "bfloat16", 16, kv_factor=1)
    assert latent.layer_bytes == 16 * 576 * 2
    with pytest.raises(ValueError, match="one kv_head"):
        KvLayout(3, 2, 576, "bfloat16", 16, kv_factor=1)
    two = describe("m", "w", KvLayout(3, 1, 576, "bfloat16", 16))
    difference = describe_difference(two, describe("m", "w", latent))
    assert difference == "kv_factor is 2, theirs is 1"


@given(tokens=st.integers(0, 10_000), block_tokens=st.integers(1, 600))
def test_the_last_touched_block_may_be_a_partial_one(tokens: int, block_tokens: int) -> None:
    touched = blocks_touched(tokens, block_tokens)
    assert touched - tokens // block_tokens == (tokens % block_tokens != 0)
    assert tokens <= touched * block_tokens < tokens + block_tokens


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int4"), ("layers", 0), ("head_dim", -1), ("kv_factor", 3)]
)
def test_a_layout_that_cannot_be_is_refused(field: str, value: object) -> None:
    fields = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32", "block_tokens": 16}
    with pytest.raises(ValueError, match=str(value)):
        KvLayout(**{**fields, field: value})  # type: ignore[arg-type]


def test_each_field_changes_the_fingerprint() -> None:
    layouts = [
        LAYOUT,
        KvLayout(4, 2, 8, "bfloat16", 16),
        KvLayout(3, 4, 8, "bfloat16", 16),
        KvLayout(3, 2, 16, "bfloat16", 16),
        KvLayout(3, 2, 8, "float16", 16),
        KvLayout(3, 2, 8, "bfloat16", 32),
        KvLayout(3, 1, 8, "bfloat16", 16),
        KvLayout(3, 1, 8, "bfloat16", 16, kv_factor=1),
    ]
    prints = [fingerprint("m", "w", layout) for layout in layouts]
    prints += [fingerprint("n", "w", LAYOUT), fingerprint("m", "x", LAYOUT)]
    prints += [fingerprint("m", "w", LAYOUT, "tp2")]
    assert len(set(prints)) == len(prints)
    assert {len(each) for each in prints} == {32}
    assert fingerprint("m", "w", LAYOUT) == prints[0]


def test_names_with_separators_cannot_imitate_other_fields() -> None:
    tricky = "m; weights_id=w"
    assert describe(tricky, "x", LAYOUT) != describe("m", "w", LAYOUT)
    difference = describe_difference(describe(tricky, "w", LAYOUT), describe("m", "w", LAYOUT))
    assert difference.startswith("model_id is ")


def test_a_difference_names_each_field_and_both_values() -> None:
    ours = describe("m", "w", LAYOUT)
    theirs = describe("m", "w2", KvLayout(3, 2, 8, "bfloat16", 32))
    assert describe_difference(ours, theirs) == (
        "weights_id is w, theirs is w2, and block_tokens is 16, theirs is 32"
    )
    assert "not given" in describe_difference(ours, "")
    assert "equal" in describe_difference(ours, ours)


@given(segment_bytes=st.integers(0, 2**30), unit_power=st.integers(12, 22))
def test_units_fill_a_segment_and_never_leave_it(segment_bytes: int, unit_power: int) -> None:
    shape = geometry(segment_bytes, 2**unit_power)
    assert shape.payload_offset_bytes >= shape.units * HEADER_BYTES
    assert shape.payload_offset_bytes % SLOT_ALIGN_BYTES == 0
    end_bytes = shape.payload_offset_bytes + shape.units * shape.unit_bytes
    assert end_bytes <= segment_bytes or shape.units == 0
    one_more = shape.units + 1
    cell = Geometry(shape.unit_bytes, 1, 0).digests(0, 1, 8)
    assert cell is not None, "a unit has room for eight digests at least"
    beside_bytes = HEADER_BYTES + max(HEADER_BYTES, shape.unit_bytes // 1024 * DIGEST_BYTES)
    headers_bytes = -(-one_more * beside_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    assert headers_bytes + one_more * shape.unit_bytes > segment_bytes, "room for another unit"


@given(
    units=st.integers(1, 500),
    unit_power=st.integers(12, 18),
    size_units=st.integers(1, 40),
    layers=st.integers(1, 128),
    seed=st.integers(0, 2**32),
)
def test_digests_lie_between_headers_and_payloads_and_never_in_each_others_cells(
    units: int, unit_power: int, size_units: int, layers: int, seed: int
) -> None:
    unit_bytes = 2**unit_power
    shape = geometry(memory_bytes_for(units, unit_bytes, unit_bytes), unit_bytes)
    slot = seed % units
    size_bytes = min(size_units, units - slot) * unit_bytes - seed % unit_bytes
    cell = shape.digests(slot, size_bytes, layers)
    if size_bytes // layers >= 1024:
        assert cell is not None, "a layer of a KiB always has room for its digest"
    if cell is None:
        return
    assert cell.stop - cell.start == layers * DIGEST_BYTES
    assert units * HEADER_BYTES <= cell.start and cell.stop <= shape.payload_offset_bytes
    behind = slot + -(-size_bytes // unit_bytes)
    after = shape.digests(behind, 1, 1) if behind < units else None
    assert after is None or cell.stop <= after.start
    before = shape.digests(slot - 1, unit_bytes, 8) if slot else None
    assert before is None or before.stop <= cell.start


def test_a_page_of_a_stage_holds_its_layers_and_nothing_else() -> None:
    parts = [PageLayout(LAYOUT, LayerRange(0, 1)), PageLayout(LAYOUT, LayerRange(1, 3))]
    whole = PageLayout.whole(LAYOUT)
    assert sum(part.page_bytes for part in parts) == whole.page_bytes == LAYOUT.block_bytes
    assert [part.is_whole for part in (*parts, whole)] == [False, False, True]
    assert parts[1].page_offset_bytes(3) == 3 * 2 * LAYOUT.layer_bytes
    assert [parts[1].layer_offset_bytes(layer) for layer in (1, 2)] == [0, LAYOUT.layer_bytes]
    assert [whole.layer_offset_bytes(x) for x in range(3)] == [
        LAYOUT.layer_offset_bytes(x) for x in range(3)
    ]
    for first, stop in ((0, 0), (2, 1), (-1, 2)):
        with pytest.raises(ValueError, match="no range"):
            LayerRange(first, stop)
    with pytest.raises(ValueError, match="3 layers"):
        PageLayout(LAYOUT, LayerRange(1, 4))


@given(
    blocks=st.integers(1, 1_000), block_bytes=st.integers(1, 2**22), unit_power=st.integers(12, 18)
)
def test_the_least_segment_for_some_blocks_has_room_for_them(
    blocks: int, block_bytes: int, unit_power: int
) -> None:
    unit_bytes = 2**unit_power
    least_bytes = memory_bytes_for(blocks, block_bytes, unit_bytes)
    units = -(-block_bytes // unit_bytes)
    assert geometry(least_bytes, unit_bytes).units // units >= blocks
    assert geometry(least_bytes - 1, unit_bytes).units // units < blocks
