"""Servers that several end-to-end tests share; starting one takes some ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.clients.keyed_gateway import keyed_gateway
from tests.e2e.gateways import Gateway
from tests.e2e.server import Server, running


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured speeds of this machine are kept here, so only the first server measures."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    """The demo checkpoint on the default repository; tests must leave it idle."""
    yield from running(tmp_path_factory.mktemp("demo"), state_dir, {})


@pytest.fixture(scope="session")
def restarted(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    """As `demo`, for tests that kill its processes or edit the conductor's settings. The launcher
    starts the processes again; a test waits for those that it needs."""
    yield from running(tmp_path_factory.mktemp("restarted"), state_dir, {})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    own = keyed_gateway(folder)
    for server in running(folder, state_dir, {}, [*own.arguments, "--openai-workers", "2"]):
        yield Gateway(server, own.called)
