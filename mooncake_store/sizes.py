"""Sizes in bytes as text, such as 512M."""

from __future__ import annotations

import re

SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", re.IGNORECASE)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size_bytes(text: str) -> float:
    """'512M', '1.5GiB' or '1073741824' as bytes. Raises ValueError if `text` is not a size."""
    match = SIZE.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 512M or 2G")
    return float(match[1]) * UNITS[match[2].upper()]
