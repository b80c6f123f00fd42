"""Starts Mooncake's master and storage node beside us and measures its client.

Not here: the measuring itself (peer_client.py, run by the Python that has Mooncake's wheel).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

START_S_MAX = 30.0
NODE_MIB = 2_048
NODE = (
    "import sys,time\n"
    "from mooncake.store import MooncakeDistributedStore\n"
    "s=MooncakeDistributedStore()\n"
    "code=s.setup('127.0.0.1:17956','P2PHANDSHAKE',int(sys.argv[2])<<20,16<<20,'tcp','',sys.argv[1])\n"
    "print('ready' if code==0 else code,flush=True)\n"
    "time.sleep(3600)\n"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(python: Path, sizes: list[int], rounds: int, is_own: bool) -> dict[str, Any]:
    """What Mooncake's client needs, from a node's memory over TCP or from the memory of its own
    process by memcpy; RuntimeError when it does not run here, with the reason."""
    port = free_port()
    master = f"127.0.0.1:{port}"
    binary = python.parent / "mooncake_master"
    if not binary.exists():
        raise RuntimeError(f"{binary} does not exist: {python} has no Mooncake wheel")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-peer-"))
        log = stack.enter_context(open(Path(folder) / "log", "w"))

        def start(*command: str, **pipes: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, stderr=log, text=True, cwd=folder, **pipes)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start(
            str(binary), f"--rpc_port={port}", f"--metrics_port={free_port()}",
            "--rpc_thread_num=4", "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={free_port()}", "--default_kv_lease_ttl=5000",
            stdout=log,
        )  # fmt: skip
        wait_for(port)
        if not is_own:
            node = start(str(python), "-c", NODE, master, str(NODE_MIB), stdout=subprocess.PIPE)
            assert node.stdout is not None
            for line in node.stdout:
                if line.startswith("ready"):
                    break
        client = subprocess.run(
            [str(python), str(Path(__file__).with_name("peer_client.py")), master, str(rounds),
             ",".join(map(str, sizes)), str(NODE_MIB if is_own else 0)],
            capture_output=True, text=True, cwd=folder, timeout=300,
            env={**os.environ, "MC_STORE_MEMCPY": "1"} if is_own else None,
        )  # fmt: skip
        lines = [line for line in client.stdout.splitlines() if line.startswith("{")]
        if client.returncode or not lines:
            raise RuntimeError(f"its client failed: {client.stderr[-500:]}")
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def wait_for(port: int) -> None:
    until_s = time.monotonic() + START_S_MAX
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if time.monotonic() > until_s:
            raise RuntimeError(f"mooncake_master does not listen on port {port}")
        time.sleep(0.1)
