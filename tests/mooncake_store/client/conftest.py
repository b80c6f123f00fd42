"""Fixtures that several tests of the store's client use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake_store.transports.nixl_agent import NixlUnavailable, load_nixl
from tests.mooncake_store.client.world import World
from tests.mooncake_store.targets import TargetPool


@pytest.fixture(params=["mapped", "auto", "nixl", "tcp"])
def world(request: pytest.FixtureRequest, targets: TargetPool) -> Iterator[World]:
    if request.param in ("auto", "nixl"):
        try:
            load_nixl()
        except NixlUnavailable as error:
            pytest.skip(str(error))
    made = World(request.param, targets)
    yield made
    made.close()


@pytest.fixture
def mapped(targets: TargetPool) -> Iterator[World]:
    made = World("mapped", targets)
    yield made
    made.close()
