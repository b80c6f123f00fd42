"""NIXL's wrapper, tamed: environment, stdout, errors, and agents that are never destroyed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from mooncake_store.transports import nixl_agent, nixl_transport
from mooncake_store.transports.nixl_agent import (
    NixlUnavailable,
    load_nixl,
    make_agent,
    prepare_environment,
)
from mooncake_store.transports.nixl_transport import NixlTransport
from tests.mooncake_store.targets import ROOT


@pytest.fixture(autouse=True)
def needs_nixl() -> None:
    try:
        load_nixl()
    except NixlUnavailable as error:
        pytest.skip(str(error))


FRESH = """
import os, sys
from mooncake_store.transports.nixl_agent import NodeAgent
import numpy as np
memory = np.zeros(4096, np.uint8)
agent = NodeAgent("fresh", memory.ctypes.data, memory.nbytes)
agent.close()
agent.close()
names = ("UCX_MODULES", "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE", "UCX_LOG_FILE")
print([os.environ.get(name) for name in names], "torch" in sys.modules)
"""


def test_a_fresh_process_gets_our_settings_a_clean_stdout_and_exits_well() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    ran = subprocess.run(
        [sys.executable, "-c", FRESH],
        cwd=ROOT,
        env={**clean, "UCX_TCP_RX_SEG_SIZE": "64K"},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    modules = None if nixl_agent.has_rdma() else "^ib"
    torch = os.path.exists("/proc/driver/nvidia")
    assert ran.stdout == f"{[modules, '64K', '64K', 'stderr']} {torch}\n", ran.stderr
    assert ran.returncode == 0


IDLE = """
import os, threading, time
import numpy as np
from mooncake_store.transports.nixl_agent import NodeAgent
memory = np.zeros(4096, np.uint8)
agent = NodeAgent("idle", memory.ctypes.data, memory.nbytes)
before_s = time.process_time()
threading.Event().wait(1.0)
print(time.process_time() - before_s, flush=True)
os._exit(0)
"""


def test_a_node_that_nobody_asks_leaves_the_cpu_alone() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IDLE],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert float(ran.stdout) < 0.3, "the progress thread spins; the stock wrapper's takes 1.0 s"


@pytest.mark.parametrize(
    ("cuda", "first"), [("12", "nixl_cu12._api"), ("13", "nixl_cu13._api"), ("", "nixl_cu13._api")]
)
def test_with_a_gpu_the_build_is_that_of_torch_s_cuda_whoever_installed_it(
    monkeypatch: pytest.MonkeyPatch, cuda: str, first: str
) -> None:
    monkeypatch.setattr(nixl_agent, "_has_gpu_stack", lambda: True)
    monkeypatch.setattr(nixl_agent, "_cuda_major", lambda: cuda)
    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", lambda name: None)
    assert nixl_agent._modules()[0] == first
    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", lambda name: name)
    assert nixl_agent._modules() == ("nixl._api",), "the package `nixl` knows itself"


def test_an_unreadable_home_is_named_before_nixl_dies_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NixlUnavailable, match=r"HOME=.* is not readable"):
        prepare_environment()


def test_what_the_wrapper_logs_is_raised() -> None:
    agent = make_agent(f"logs-{os.getpid()}", has_progress_thread=False)
    with pytest.raises(NixlUnavailable, match="mem type"):
        agent.get_xfer_descs([(1, 2, 3)], None)
    assert logging.raiseExceptions, "importing nixl switches this off for the whole process"


def test_a_ucx_that_cannot_start_is_an_error_with_a_remedy() -> None:
    script = "from mooncake_store.transports.nixl_agent import make_agent; make_agent('x', False)"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "UCX_TLS": "posix,self"},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert "NixlUnavailable" in ran.stderr and "leave UCX_TLS unset" in ran.stderr


def test_the_lanes_of_a_closed_transport_are_used_again_unless_one_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_transport, "_spare", [])  # other tests leave some too
    first = NixlTransport()
    [lane] = first._lanes
    first.register(np.zeros(4096, np.uint8))
    first.close()
    first.close()
    second = NixlTransport()
    assert second._lanes == [lane] and not lane._registered
    lane.has_failed = True
    second.close()
    third = NixlTransport()
    assert third._lanes != [lane]
    third.close()


def test_memory_that_cannot_be_registered_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = NixlTransport()
    [lane] = transport._lanes

    class Refusing:
        def register_memory(self, *_: object) -> None:
            raise load_nixl().nixlBind.nixlBackendError("no")

    with monkeypatch.context() as patch:
        patch.setattr(lane, "_agent", Refusing())
        with pytest.raises(NixlUnavailable, match=r"4096 bytes .*ulimit -l"):
            transport.register(np.zeros(4096, np.uint8))
    assert not lane.lock.locked()
    transport.close()


def test_lanes_that_were_made_before_are_the_ones_that_threads_get() -> None:
    transport = NixlTransport()
    try:
        transport.make_lanes(2)
        transport.make_lanes(1)  # never fewer than there are
        lanes = list(transport._lanes)
        assert len(lanes) == 2
        taken = [transport._take_lane(time.monotonic() + 5.0) for _ in range(2)]
        assert {id(lane) for lane in taken} == {id(lane) for lane in lanes}
        for lane in taken:
            lane.lock.release()
        assert transport._lanes == lanes
    finally:
        transport.close()
