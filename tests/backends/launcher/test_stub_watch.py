"""Processes of models: which live, and which a dead launch has left."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.launcher.triton_process import STUB, Stubs, end_orphans
from tests.e2e.server import wait_until


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts something that looks like Triton's stub of a model, and lives until it is ended."""
    program = tmp_path / STUB
    shutil.copyfile("/bin/sh", program)
    program.chmod(0o700)
    started: list[subprocess.Popen[bytes]] = []

    def start(model: str, region: str) -> subprocess.Popen[bytes]:
        script = tmp_path / model / "1" / "model.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("read forever\n")
        started.append(subprocess.Popen([program, script, region], stdin=subprocess.PIPE))
        wait_until(lambda: model in Stubs().models_alive({os.getpid()})[os.getpid()], "it to run")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_models_that_have_a_process_are_found_by_their_triton(
    stub: Callable[..., subprocess.Popen[bytes]],
) -> None:
    stub("decode_0", "mooncake-1-aaaaaaaa-triton-x")
    died = stub("decode_1", "mooncake-1-aaaaaaaa-triton-y")
    stubs = Stubs()
    assert stubs.models_alive({os.getpid(), 1}) == {os.getpid(): {"decode_0", "decode_1"}, 1: set()}
    died.kill()
    wait_until(lambda: stubs.models_alive({os.getpid()})[os.getpid()] == {"decode_0"}, "its end")


def test_what_dead_launches_left_is_ended_and_nothing_else(
    stub: Callable[..., subprocess.Popen[bytes]],
) -> None:
    left = stub("decode_0", "mooncake-1-aaaaaaaa-triton-decode_0-python")
    alive = stub("decode_1", "mooncake-1-bbbbbbbb-triton-decode_1-python")
    end_orphans(["mooncake-1-aaaaaaaa", "mooncake-2-cccccccc"])
    assert left.wait(30.0) == -9
    assert alive.poll() is None
    end_orphans([])
    assert alive.poll() is None


def test_a_model_that_is_started_later_is_found_too(
    stub: Callable[..., subprocess.Popen[bytes]],
) -> None:
    stubs, here = Stubs(), os.getpid()
    assert stubs.models_alive({here}) == {here: set()}
    stub("decode_0", "mooncake-1-aaaaaaaa-triton-x")
    assert stubs.models_alive({here}) == {here: {"decode_0"}}
    assert stubs.models_alive({1}) == {1: set()}
