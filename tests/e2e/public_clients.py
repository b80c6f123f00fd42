"""Clients that others wrote, where `make clients` has installed them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.clients.environment import ENVIRONMENTS


def installed(name: str) -> Path:
    """The folder of its programs."""
    binaries = ENVIRONMENTS / name / "bin"
    if not (binaries.parent / "installed.txt").exists():
        pytest.skip(f"{name} is not installed; `make clients` does that, in a minute")
    return binaries
