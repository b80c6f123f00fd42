"""One Triton of the launcher, over a small program in its place: ports, incarnations, restarts."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from backends.launcher import environment
from backends.launcher.repository import ModelLoad
from backends.launcher.triton_process import (
    CRASHES_MAX,
    Endpoints,
    Restart,
    Triton,
    TritonSetup,
    WorkerTriton,
)
from mooncake_store.process.child_processes import ChildDied, Command
from tests.e2e.server import wait_until

# Says what a Triton would: it loaded its model, or that its gRPC port was taken, which ends it.
PROGRAM = """
import signal, socket, sys
port = int(sys.argv[1])
with socket.socket() as server:
    try:
        server.bind(("127.0.0.1", port))
    except OSError:
        print(f'E0101 main.cc:1] "failed to start GRPC service: Unavailable - Socket {port} "')
        sys.exit(1)
    server.listen()
    print("I0101 x.cc:1] \\"successfully loaded 'decode_0'\\"", flush=True)
    signal.pause()
"""


def plan(triton: Triton, endpoints: Endpoints) -> Command:
    port = endpoints.grpc.rpartition(":")[2]
    return Command([sys.executable, "-c", PROGRAM, port], os.environ)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerTriton]:
    folder = tmp_path / "source" / "decode_0"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "decode"\n')
    setup = TritonSetup(tmp_path / "source", tmp_path / "mirrors", tmp_path, tmp_path, plan)
    made = WorkerTriton("decode_0", setup)
    made.mirror.sync(is_first=True)
    yield made
    if made.child is not None:
        made.child.kill()


def loaded(worker: WorkerTriton) -> Callable[[], bool]:
    return lambda: bool(worker.take_loads())


def test_ports_are_free_differ_and_are_promised_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        taken = held.getsockname()[1]
        for _ in range(20):
            ports = environment.free_ports(3, {taken + 1}, taken - 4, taken + 8)
            assert len(set(ports)) == 3 and not {taken, taken + 1} & set(ports)


def test_a_start_that_loses_the_race_for_its_port_takes_another(
    worker: WorkerTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        taken = held.getsockname()[1]
        right = environment.free_ports
        first = iter([right(1, ()), [taken]])  # for metrics, and for gRPC
        monkeypatch.setattr(
            "backends.launcher.triton_process.free_ports",
            lambda *asked: next(first, None) or right(*asked),
        )
        worker.start()
        assert worker.child is not None
        wait_until(lambda: worker.supervise_start() == "" and loaded(worker)(), "another port")
    assert worker.child.starts == 2
    assert worker.endpoints is not None and str(taken) not in worker.endpoints.grpc


@pytest.mark.parametrize("crashes", [CRASHES_MAX, CRASHES_MAX + 1])
def test_a_start_that_aborts_is_tried_again_but_not_for_ever(
    worker: WorkerTriton, tmp_path: Path, crashes: int
) -> None:
    begun: list[int] = []

    def start(triton: Triton, endpoints: Endpoints) -> Command:
        begun.append(len(begun))
        aborts = [sys.executable, "-c", "import os; print('an exception', flush=True); os.abort()"]
        return Command(aborts, os.environ) if len(begun) <= crashes else plan(triton, endpoints)

    worker._command_of = start
    worker.start()

    def is_loaded() -> bool:
        return worker.supervise_start() == "" and loaded(worker)()

    if crashes <= CRASHES_MAX:
        wait_until(is_loaded, "the start that does not abort")
    else:
        with pytest.raises(ChildDied, match="an exception"):
            wait_until(is_loaded, "the launcher to give up")
    assert len(begun) == CRASHES_MAX + 1


def test_a_worker_whose_process_died_gets_a_new_triton_with_other_ports(
    worker: WorkerTriton,
) -> None:
    worker.start()
    before, incarnation = worker.endpoints, worker.incarnation
    wait_until(lambda: worker.supervise({"decode_0"}) == [] and worker._loaded, "it to load")
    assert worker.supervise({"decode_0"}) == [], "its process incarnations"
    assert worker.supervise(set()) == [Restart("decode_0")]
    assert worker.endpoints != before and worker.incarnation > incarnation
    wait_until(lambda: worker.supervise({"decode_0"}) == [] and worker._loaded, "it to load again")


def test_a_process_that_comes_and_goes_while_it_never_loads_is_triton_s_business(
    worker: WorkerTriton,
) -> None:
    worker.start()
    worker._read_log = lambda: None  # type: ignore[method-assign]  # nothing was loaded
    assert [worker.supervise(alive) for alive in ({"decode_0"}, set(), {"decode_0"}, set())] == [
        []
    ] * 4


REFUSES = """
import signal
refused = "failed to load 'decode_0' version 1: Internal: "
for outcome in (refused + "one", "successfully loaded 'decode_0'", refused + "two"):
    print(f'I0101 x.cc:1] "{outcome}"', flush=True)
signal.pause()
"""


def test_a_refused_model_is_new_until_it_has_loaded(worker: WorkerTriton) -> None:
    worker._command_of = lambda *_: Command([sys.executable, "-c", REFUSES], os.environ)
    worker.start()
    loads: list[ModelLoad] = []
    wait_until(lambda: loads.extend(worker.take_loads()) or len(loads) == 3, "three outcomes")
    outcomes = [(load.reason, load.is_new) for load in loads]
    assert outcomes == [("one", True), ("", False), ("two", False)]


STUCK = """
import signal, sys
print("I decode_0 (0123456789ab) serves on node s0", flush=True)
signal.pause()
"""


def test_a_worker_that_its_triton_never_calls_loaded_gets_a_new_triton(
    worker: WorkerTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._command_of = lambda *_: Command([sys.executable, "-c", STUCK], os.environ)
    worker.start()
    assert worker.child is not None
    wait_until(lambda: worker.supervise(set()) == [] and worker._load_pending_from_s, "its word")
    assert worker.supervise(set()) == [] and worker.child.starts == 1, "it has some seconds"
    monkeypatch.setattr("backends.launcher.triton_process.LOAD_PENDING_S_MAX", 0.0)
    assert worker.supervise(set()) == [Restart("decode_0")]
    assert worker.child.starts == 2


def test_a_removed_worker_is_ended_when_its_model_has_ended(worker: WorkerTriton) -> None:
    worker.start()
    assert not worker.drain({"decode_0"}), "it still ends what it has"
    assert worker.mirror.models() == set(), "Triton is told to unload it"
    assert not worker.drain({"decode_0"})
    wait_until(lambda: worker.drain(set()), "its Triton to end")
    assert worker.pid is None


LEAVES_A_STUB = """
import signal, subprocess, sys
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
stub = subprocess.Popen([sys.executable, "-c", deaf + "signal.pause()"], stdout=subprocess.PIPE)
stub.stdout.readline()
print(f"stub {stub.pid}", flush=True)
signal.pause()
"""


def test_a_worker_that_is_drained_leaves_no_process_that_hangs(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "decode_0"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "decode"\n')
    setup = TritonSetup(
        tmp_path / "source",
        tmp_path / "mirrors",
        tmp_path,
        tmp_path,
        lambda *_: Command([sys.executable, "-c", LEAVES_A_STUB], os.environ),
    )
    worker = WorkerTriton("decode_0", setup)
    log = worker.log_path
    worker.mirror.sync(is_first=True)
    worker.start()
    wait_until(lambda: "stub " in log.read_text(), "its stub to be there")
    stub = psutil.Process(int(log.read_text().split()[1]))
    wait_until(lambda: worker.drain(set()), "the worker to have ended")
    wait_until(lambda: not is_running(stub), "its stub to have ended")


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
