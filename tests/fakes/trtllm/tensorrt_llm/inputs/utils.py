"""The number of a cache salt: the only form in which some versions show it to connectors."""

from __future__ import annotations

import hashlib


def get_cache_salt_id(cache_salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(cache_salt.encode(), digest_size=8).digest(), "little")
