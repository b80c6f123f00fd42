"""`mooncake store`, typed as a person would, against a real store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mooncake_store.cli.app import app
from mooncake_store.client.client import key_of
from tests.mooncake_store.processes import SiteProcesses

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path_factory.mktemp("site"), "--slow-start-s", "0.001")
    made.node("s0", 16)
    made.node("s1", 16)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    path.write_bytes(os.urandom(100_000))
    return path


def typed(site: SiteProcesses, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--directory", site.address])


def test_a_file_is_put_found_checked_and_got_back(
    site: SiteProcesses, file: Path, tmp_path: Path
) -> None:
    assert typed(site, "put", "novel", str(file)).exit_code == 0
    back = tmp_path / "back"
    assert typed(site, "get", "novel", str(back)).exit_code == 0
    assert back.read_bytes() == file.read_bytes()
    key = key_of("novel").hex()
    assert key in typed(site, "ls").output
    (copy,) = json.loads(typed(site, "stat", key, "--json").output)[key]
    assert copy["size_bytes"] == 100_000
    assert "1 blocks read, 0 corrupt" in typed(site, "check").output
    assert typed(site, "remove", "novel").exit_code == 0
    gone = typed(site, "get", "novel")
    assert gone.exit_code == 1 and "not in the store: novel" in gone.output


def test_the_state_of_the_store_is_a_table_or_a_line_of_json(site: SiteProcesses) -> None:
    shown = typed(site, "stat").output
    assert "s0" in shown and "epoch" in shown
    assert {
        node["node_id"] for node in json.loads(typed(site, "stat", "--json").output)["nodes"]
    } == {"s0", "s1"}


def test_a_drained_node_can_be_stopped_without_loss(site: SiteProcesses, file: Path) -> None:
    assert typed(site, "put", "kept", str(file), "--node", "s0").exit_code == 0
    said = typed(site, "drain", "s0")
    assert said.exit_code == 0 and "s0 can be stopped" in said.output
    (one, two) = json.loads(typed(site, "stat", "kept", "--json").output)["kept"]
    assert {one["node_id"], two["node_id"]} == {"s0", "s1"}
    refused = typed(site, "put", "more", str(file), "--node", "s0")
    assert refused.exit_code == 1 and "no room" in refused.output
    assert typed(site, "drain", "s0", "--undo").exit_code == 0
    assert typed(site, "put", "more", str(file), "--node", "s0").exit_code == 0
    assert typed(site, "remove", "kept", "more").exit_code == 0


def test_pins_and_quotas_are_set_by_name(site: SiteProcesses, file: Path) -> None:
    assert typed(site, "quota", "guest", "50K").exit_code == 0
    over = typed(site, "put", "big", str(file), "--tenant", "guest")
    assert over.exit_code == 1 and "QuotaExceeded: tenant guest" in over.output
    assert typed(site, "quota", "guest", "0").exit_code == 0
    assert typed(site, "put", "big", str(file), "--tenant", "guest").exit_code == 0
    assert typed(site, "pin", "big", "--kind", "hard").exit_code == 0
    assert json.loads(typed(site, "stat", "--json").output)["pins"] == 1
    assert typed(site, "pin", "big", "--kind", "none").exit_code == 0
    odd = typed(site, "pin", "big", "--kind", "rusty")
    assert odd.exit_code == 1 and "none, soft, hard" in odd.output
    typed(site, "remove", "big")


def test_errors_are_one_line_that_names_the_class(site: SiteProcesses) -> None:
    said = typed(site, "drain", "moon")
    assert said.exit_code == 1 and said.output.strip().startswith("NodeUnknown: storage node moon")
    assert typed(site, "ls", "--node", "moon").exit_code == 1


def test_serve_runs_a_store_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mooncake_store.cli.app",
        "serve",
        "--store-bytes",
        "8M",
        "--folder",
        str(tmp_path / "run"),
        "--nodes",
        "x,y",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        said = CliRunner().invoke(app, ["stat", "--json", "--directory", address])
        assert {node["node_id"] for node in json.loads(said.output)["nodes"]} == {"x", "y"}
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    assert not (tmp_path / "run" / "directory").exists()
