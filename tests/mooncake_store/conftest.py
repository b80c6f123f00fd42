"""Fixtures that several tests of the store use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mooncake_store.targets import TargetPool


@pytest.fixture(scope="session")
def targets() -> Iterator[TargetPool]:
    """Processes that answer NIXL."""
    pool = TargetPool()
    yield pool
    pool.close()
