"""KV as fp8 e4m3: a sign, four bits of exponent and three of mantissa, from 2^-9 to 448.

A page holds K / k_scale and V / v_scale, rounded to the nearest fp8. Values beyond 448 become 448.
Each layer has one scale for K and one for V. weights.py multiplies the scales into weights before
and after attention, so this module does not need them. native.c implements the same conversion. On
a CPU, NaN in K or V (of a broken model) is read as 480, which no other fp8 means.
"""

from __future__ import annotations

import torch

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0


def rounded(kv: torch.Tensor) -> torch.Tensor:
    """The bytes of the nearest fp8, as uint8, which torch can index on every device."""
    return kv.float().clamp_(-LARGEST, LARGEST).to(DTYPE).view(torch.uint8)


def widened(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 -> `dtype`, exactly: every dtype of computation can represent all fp8 values.

    On a CPU torch takes 2.6 ns per value. Shifting the bits into a float16, which has 1/256 of the
    value, takes 0.8 ns.
    """
    if raw.device.type != "cpu":
        return raw.view(DTYPE).to(dtype)
    shifted = (
        raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(0xBFFF - 2**16)
    )
    return shifted.view(torch.float16).to(dtype).mul_(256.0)
