"""An election of its own for each test, and directories that take part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mooncake_store.elected import Elected
from tests.mooncake_store.etcd_process import EtcdProcess


@pytest.fixture
def election(etcd: EtcdProcess) -> str:
    return f"etcd://127.0.0.1:{etcd.port}/{etcd.fresh_prefix()}"


@pytest.fixture
def start(tmp_path: Path, election: str) -> Iterator[Callable[[str], Elected]]:
    started: list[Elected] = []

    def start_one(name: str) -> Elected:
        started.append(Elected(tmp_path, name, election))
        return started[-1]

    yield start_one
    for one in started:
        one.close()
