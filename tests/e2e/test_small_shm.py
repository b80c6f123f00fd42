"""With exactly as much of /dev/shm as the README asks for, a storage node that dies comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_store.directory.client import DirectoryClient
from tests.e2e.server import Server, running, wait_until
from tests.e2e.server_processes import process_of
from tests.e2e.test_pools import B, ask, directory_address

pytestmark = pytest.mark.long

README_BYTES = 3 * 2**30
PYTHON = """#!/bin/sh
exec unshare -m sh -c 'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"' {python} "$@"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    """As `mooncake serve` comes, in a /dev/shm of its own."""
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs root, to mount a /dev/shm of its own")
    folder = tmp_path_factory.mktemp("small-shm")
    python = folder / "python"
    python.write_text(PYTHON.format(size=README_BYTES, python=sys.executable))
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        yield from running(folder, state_dir, {}, ["--store-bytes", "1G"])


def test_a_killed_storage_node_comes_back_and_serving_goes_on(server: Server) -> None:
    prompts = [[16 + number] * (16 * B) for number in range(4)]
    for prompt in prompts:
        ask(server, prompt)
    with DirectoryClient(directory_address(server)) as client:
        for node in ("s0", "s1"):
            before = {info.node_id: info.incarnation for info in client.nodes()}
            process_of(server, f"--node-id {node}").kill()

            def is_back(node: str = node, life: str = before[node]) -> bool:
                found = {info.node_id: info.incarnation for info in client.nodes()}
                assert server.process.poll() is None, server.log.read_text()[-2000:]
                return found.get(node, life) != life

            wait_until(is_back, f"{node} to come back", 60.0)
            number = node[1:]
            wait_until(
                lambda number=number: (
                    not server.ask(  # type: ignore[misc]
                        input_ids=prompts[0],
                        max_tokens=4,
                        end_id=-1,
                        parameters={
                            "prefill_worker": f"prefill_{number}",
                            "decode_worker": f"decode_{number}",
                        },
                    ).error
                ),
                f"both workers of {node} to serve",
                60.0,
            )
    said = server.log.read_text()
    assert [said.count(f"node-{node} died") for node in ("s0", "s1")] == [1, 1], said
