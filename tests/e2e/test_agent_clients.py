"""Agent frameworks and tools, where `make clients` has installed them, on a served SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.clients import libraries
from bench.clients.__main__ import CHECKPOINT
from bench.clients.call_matrix import CalledServer
from bench.clients.keyed_gateway import checkpoint_folder, public_server
from tests.e2e.public_clients import installed

GATING = [name for name, agent in libraries.AGENTS.items() if agent.gates]


@pytest.fixture(scope="module")
def called() -> Iterator[CalledServer]:
    if not checkpoint_folder(CHECKPOINT).is_dir():
        pytest.skip(f"there is no {CHECKPOINT}; `mooncake model get {CHECKPOINT}` fetches it")
    with public_server(None, None, CHECKPOINT) as server:
        assert server.gateway is not None
        yield server.gateway


@pytest.mark.parametrize("name", GATING)
def test_an_installed_agent_framework_completes_its_script(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    binaries = installed(name)
    server = request.getfixturevalue("called")
    found = libraries.run(libraries.AGENTS[name], binaries, server, tmp_path / "out")
    assert not found.failed, "\n".join(f"{each.call}: {each.failure}" for each in found.failed)
