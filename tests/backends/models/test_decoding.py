"""Each supported tensor type is decoded as the format describes it.

The decoders here follow the description of ggml's blocks, one scalar at a time. The package `gguf`,
which the conversion uses, decodes with numpy.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from backends.models.conversion import bfloat16
from backends.models.gguf_file import TENSOR_TYPES, GgufFile
from tests.backends.models.gguf_files import SmallModel, random_blocks

ROWS, SCALARS = 3, 512


def f32(raw: bytes) -> Iterator[float]:
    yield struct.unpack("<f", raw)[0]


def f16(raw: bytes) -> Iterator[float]:
    yield half(raw, 0)


def bf16(raw: bytes) -> Iterator[float]:
    yield struct.unpack("<f", b"\0\0" + raw)[0]  # the upper half of a float32


def half(raw: bytes, offset: int) -> float:
    value: float = struct.unpack_from("<e", raw, offset)[0]
    return value


def nibbles(raw: bytes) -> list[int]:
    """32 numbers of 16 bytes: first all lower nibbles, then all upper nibbles."""
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def q4_0(raw: bytes) -> Iterator[float]:
    for number in nibbles(raw[2:]):
        yield half(raw, 0) * (number - 8)


def q4_1(raw: bytes) -> Iterator[float]:
    for number in nibbles(raw[4:]):
        yield half(raw, 0) * number + half(raw, 2)


def fifth_bits(raw: bytes, offset: int) -> list[int]:
    bits = struct.unpack_from("<I", raw, offset)[0]
    return [(bits >> index & 1) * 16 for index in range(32)]


def q5_0(raw: bytes) -> Iterator[float]:
    for number, fifth in zip(nibbles(raw[6:]), fifth_bits(raw, 2), strict=True):
        yield half(raw, 0) * (number + fifth - 16)


def q5_1(raw: bytes) -> Iterator[float]:
    for number, fifth in zip(nibbles(raw[8:]), fifth_bits(raw, 4), strict=True):
        yield half(raw, 0) * (number + fifth) + half(raw, 2)


def q8_0(raw: bytes) -> Iterator[float]:
    for number in struct.unpack("<32b", raw[2:]):
        yield half(raw, 0) * number


def scale_and_minimum(scales: bytes, group: int) -> tuple[int, int]:
    """Eight pairs of six bits each in 12 bytes: the last four pairs are spread over all bytes."""
    if group < 4:
        return scales[group] & 63, scales[group + 4] & 63
    low = scales[group + 4]
    return low & 15 | scales[group - 4] >> 6 << 4, low >> 4 | scales[group] >> 6 << 4


def q4_k(raw: bytes) -> Iterator[float]:
    for group in range(8):
        scale, minimum = scale_and_minimum(raw[4:16], group)
        start = 16 + group // 2 * 32
        for number in nibbles(raw[start : start + 32])[group % 2 * 32 :][:32]:
            yield half(raw, 0) * scale * number - half(raw, 2) * minimum


def q5_k(raw: bytes) -> Iterator[float]:
    for group in range(8):
        scale, minimum = scale_and_minimum(raw[4:16], group)
        start = 48 + group // 2 * 32
        numbers = nibbles(raw[start : start + 32])[group % 2 * 32 :][:32]
        for number, fifth in zip(numbers, raw[16:48], strict=True):
            value = number + (fifth >> group & 1) * 16
            yield half(raw, 0) * scale * value - half(raw, 2) * minimum


def q6_k(raw: bytes) -> Iterator[float]:
    """256 scalars: 128 bytes with lower four bits, 64 with upper two, 16 signed scales, a half."""
    scales = struct.unpack("<16b", raw[192:208])
    for index in range(256):
        part, inside = divmod(index, 128)
        quarter, column = divmod(inside, 32)
        low = raw[part * 64 + quarter % 2 * 32 + column] >> quarter // 2 * 4 & 15
        high = raw[128 + part * 32 + column] >> quarter * 2 & 3
        yield half(raw, 208) * scales[index // 16] * ((low | high << 4) - 32)


DECODERS: dict[str, Callable[[bytes], Iterator[float]]] = {
    decode.__name__.upper(): decode
    for decode in (f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k)
}


@pytest.mark.parametrize("name", TENSOR_TYPES)
def test_random_blocks_of_a_type_are_decoded_as_described(
    name: str, seed: int, tmp_path: Path
) -> None:
    rng, kind = random.Random(seed), gguf.GGMLQuantizationType[name]
    if name in ("F32", "F16", "BF16"):
        values = np.array([rng.gauss(0, 1) for _ in range(ROWS * SCALARS)], np.float32)
        raw = gguf.quantize(values.reshape(ROWS, SCALARS), kind)
        raw = raw.view(np.uint8).reshape(ROWS, -1)
    else:
        raw = random_blocks(rng, kind, ROWS, SCALARS)
    model = SmallModel({"general.architecture": "llama"}, {"x": raw}, {"x": kind})
    file = GgufFile.open(model.write(tmp_path / "x.gguf"))
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    content = raw.tobytes()
    expected = [
        value
        for start in range(0, len(content), block_bytes)
        for value in DECODERS[name](content[start : start + block_bytes])
    ]
    (decoded,) = file.rows("x")
    assert decoded.dtype == np.float32 and decoded.shape == (ROWS, SCALARS)
    # Sums are computed in float32, so a difference of two products has an error relative to these.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(decoded.ravel(), expected, rtol=1e-6, atol=scale * 1e-6)


def test_bfloat16_is_the_nearest_with_ties_to_even() -> None:
    cases = {
        0x3F800000: 0x3F80,
        0x3F808000: 0x3F80,  # a tie: the even one is below
        0x3F818000: 0x3F82,  # a tie: the even one is above
        0x3F808001: 0x3F81,
        0xBF80FFFF: 0xBF81,
        0x7F7FFFFF: 0x7F80,  # beyond the largest bfloat16: infinite
        0xFF800000: 0xFF80,
        0x80000000: 0x8000,
    }
    values = np.array(list(cases), np.uint32).view(np.float32)
    assert bfloat16(values).tolist() == list(cases.values())
    is_nan = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert all(bits & 0x7F80 == 0x7F80 and bits & 0x7F for bits in bfloat16(is_nan).tolist())
