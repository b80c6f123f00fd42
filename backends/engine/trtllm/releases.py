"""Releases of TensorRT-LLM: their order, and the KV cache manager that each is used with. Pure."""

from __future__ import annotations

import re

V1, V2 = 1, 2  # generations of TensorRT-LLM's KV cache manager
KV_MANAGERS = {(1, 2): V1, (1, 3): V1, (1, 4): V2}
Release = tuple[int, int, int, float]  # the last: number of the candidate; inf: none


class UnknownRelease(ValueError):
    """No KV cache manager is known to work with this release."""


def release(version: str) -> Release:
    """1.3.0rc24 -> (1, 3, 0, 24.0); comparable. An unreadable version is the oldest."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?", version)
    if found is None:
        return 0, 0, 0, 0.0
    major, minor, patch, candidate = found.groups(default="inf")
    return int(major), int(minor), int(patch), float(candidate)


def kv_manager_of(version: str) -> int:
    """Raises UnknownRelease."""
    manager = KV_MANAGERS.get(release(version)[:2])
    if manager is None:
        known = ", ".join(f"{a}.{b} (V{which})" for (a, b), which in KV_MANAGERS.items())
        raise UnknownRelease(
            f"tensorrt_llm {version} is not among the known releases, with the KV cache manager "
            f"that each is used with: {known}. Install one of them, or see what differs: `mooncake "
            "doctor --engine tensorrt_llm`"
        )
    return manager
