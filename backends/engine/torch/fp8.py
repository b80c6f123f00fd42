"""KV as fp8 e4m3: sign, four bits of exponent, three of mantissa; magnitudes from 2^-9 to 448.

A page holds K / k_scale and V / v_scale, rounded to the nearest fp8. Magnitudes above 448 become
448. Each layer has one scale for K and one for V. weights.py folds the scales into the weights
before and after attention, so this module does not use them. native.c has the same conversion. On
a CPU, NaN of a broken model is read as 480, which is no value of fp8 e4m3.
"""

from __future__ import annotations

import torch

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0


def rounded(kv: torch.Tensor) -> torch.Tensor:
    """The nearest fp8 values as uint8, because torch cannot index fp8 on every device."""
    return kv.float().clamp_(-LARGEST, LARGEST).to(DTYPE).view(torch.uint8)


def widened(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 -> `dtype`. Exact, because every dtype of computation can represent all fp8 values.

    On a CPU the bits are shifted into a float16, which is 1/256 of the value. This takes 0.8 ns per
    value, and torch's conversion takes 2.6 ns.
    """
    if raw.device.type != "cpu":
        return raw.view(DTYPE).to(dtype)
    shifted = (
        raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(0xBFFF - 2**16)
    )
    return shifted.view(torch.float16).to(dtype).mul_(256.0)
