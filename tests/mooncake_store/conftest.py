"""Fixtures that several tests of the store use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mooncake_store.etcd_process import BINARY, HOW_TO, EtcdProcess
from tests.mooncake_store.targets import TargetPool


@pytest.fixture(scope="session")
def targets() -> Iterator[TargetPool]:
    """Processes that answer NIXL."""
    pool = TargetPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    if BINARY is None:
        pytest.skip(HOW_TO)
    started = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    yield started
    started.close()
