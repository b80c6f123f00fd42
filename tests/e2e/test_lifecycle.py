"""Starting and stopping: refusals that say what to do, and nothing left behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.backends.small_tokenizers import DEMO
from tests.e2e.server import READY_S_MAX, Server, leftovers, wait_until

STOP_S_MAX = 15.0


@pytest.fixture
def serve(tmp_path: Path, state_dir: Path):
    """Starts servers that are gone after the test, also when it fails."""
    started: list[Server] = []

    def start(
        *arguments: str, wait: bool = True, parameters: dict[str, str] | None = None
    ) -> Server:
        folder = tmp_path / f"server{len(started)}"
        server = Server(folder, state_dir, parameters or {}, arguments, wait=wait)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop(signal.SIGKILL)


def children(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    """Zombies are not: nobody here is the parent who would collect them."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_refused(server: Server, *parts: str) -> None:
    """It ends with status 1 and says each of `parts`; nothing is left behind."""
    assert server.process.wait(60.0) == 1
    said = " ".join(server.log.read_text(errors="replace").split())
    assert "cannot serve" in said
    for part in parts:
        assert part in said, (part, said[-2000:])
    assert "Traceback" not in said
    wait_until(lambda: not leftovers(server), "everything to be cleaned up")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_who_sees_the_conductor_ready_is_answered_and_a_signal_ends_everything_meanwhile(
    serve: Callable[..., Server], number: int
) -> None:
    server = serve(wait=False)
    url = f"http://{server.addresses.http}/v2/models/conductor/ready"

    def is_ready() -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(url, timeout=2.0).status == 200
        return False

    wait_until(is_ready, "the conductor to be ready", READY_S_MAX)
    assert not (answer := server.ask(text_input="It was", max_tokens=2)).error, answer.error
    streams = [
        server.stream(text_input="It was", max_tokens=4000, end_id=-1, stream=True)
        for _ in range(6)
    ]
    for stream in streams:
        assert stream.next() is not None
    left = children(server)
    took_s = server.stop(number)
    print(f"stopped after {took_s:.1f} s")
    assert took_s < STOP_S_MAX
    assert server.process.returncode == 0
    assert not leftovers(server), leftovers(server)
    assert not [process for process in left if is_alive(process)]
    for stream in streams:
        stream.leave()


@pytest.mark.long
def test_a_killed_launcher_takes_everything_with_it(serve: Callable[..., Server]) -> None:
    server = serve()
    left = children(server)
    server.stop(signal.SIGKILL)
    wait_until(lambda: not [p for p in left if is_alive(p)], "every process to end")
    assert leftovers(server), "a launcher that is killed cleans nothing up"
    # The files of a launcher that was killed are removed by the next one, before it serves.
    after = serve(wait=False)
    wait_until(lambda: not leftovers(server), f"{leftovers(server)} to be removed", READY_S_MAX)
    after.stop()


@pytest.mark.long
def test_ctrl_c_during_the_cleanup_of_a_failed_start_leaves_nothing(
    serve: Callable[..., Server],
) -> None:
    server = serve(wait=False, parameters={"slots": "0"})
    wait_until(lambda: "cannot serve" in server.log.read_text(), "the refusal", 60.0)
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGINT)
    assert_refused(server, "slots is 0")


def test_a_taken_port_is_named_with_the_remedy(serve: Callable[..., Server]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        server = serve("--metrics-port", str(port), wait=False)
        assert_refused(server, f"metrics port 127.0.0.1:{port}", "--metrics-port")


def test_a_full_shared_memory_is_refused_before_anything_starts(
    serve: Callable[..., Server],
) -> None:
    free = os.statvfs("/dev/shm")
    server = serve("--store-bytes", str(free.f_bavail * free.f_frsize), wait=False)
    assert_refused(server, "/dev/shm has", "MiB free", "--store-bytes")


@pytest.mark.long
def test_a_damaged_checkpoint_is_refused_with_the_reason(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(DEMO, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    server = serve(wait=False, parameters={"checkpoint": str(damaged)})
    assert_refused(
        server,
        "these models did not load",
        "prefill_0: ",
        "decode_1: ",
        "model.safetensors is cut short",
    )


def test_a_missing_repository_and_a_bad_size_are_refused(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from backends.cli import app

    runner = CliRunner()
    missing = runner.invoke(
        app,
        [
            "serve",
            "--model-repository",
            str(tmp_path / "none"),
            "--state-dir",
            str(tmp_path / "state"),
        ],
    )
    assert missing.exit_code == 1 and "no model repository" in missing.output.replace("\n", " ")
    size = runner.invoke(app, ["serve", "--store-bytes", "lots"])
    assert size.exit_code == 2 and "is not a size" in size.output
