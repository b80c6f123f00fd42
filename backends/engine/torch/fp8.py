"""KV as fp8: e4m3, a sign, four bits of exponent and three of mantissa, from 2^-9 to 448.

What a page holds is K / k_scale and V / v_scale, rounded to the nearest fp8; what is beyond 448
becomes 448. The scales, one number for all of K and one for all of V of a layer, are not seen here:
weights.py multiplies them into the matrices before and behind attention.

Native code does the same on its own (native.c). NaN in K or V, of a model that is broken already,
is read as 480 on a CPU, which no number is otherwise. Not here: where the bytes go (kv_memory.py).
"""

from __future__ import annotations

import torch

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0


def rounded(kv: torch.Tensor) -> torch.Tensor:
    """The bytes of the nearest fp8, uint8: torch indexes those on every device."""
    return kv.float().clamp_(-LARGEST, LARGEST).to(DTYPE).view(torch.uint8)


def widened(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 -> the numbers, exactly: each of `dtype`s that an engine computes in has all fp8.

    On a CPU torch takes 2.6 ns for each. A float16 of the same bits, shifted, is a 256th: 0.8 ns.
    """
    if raw.device.type != "cpu":
        return raw.view(DTYPE).to(dtype)
    shifted = (
        raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(0xBFFF - 2**16)
    )
    return shifted.view(torch.float16).to(dtype).mul_(256.0)
