"""Mooncake's own store as processes of its wheel, called one batch at a time, in turns with ours.

Two of its paths: "tcp", with the blocks in another process, over loopback, which the wheel uses
between processes of one host; and "own process", with the blocks in the client itself, which copies
them. Neither verifies the bytes.

Not here: the code in Mooncake's Python (mooncake_client.py).
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from bench.harness.processes import PeerProcess
from loadtest.harness.server import own_ports

TCP, OWN_PROCESS = "TCP", "own process"
NODE_MIB = 2_048
START_S_MAX = 30.0


class Mooncake:
    """A master, a client, and a node of it for the TCP path; all end with the stack.

    RuntimeError, with the reason, if it does not run here.
    """

    def __init__(self, stack: contextlib.ExitStack, python: Path, path: str) -> None:
        binary = python.parent / "mooncake_master"
        script = Path(__file__).with_name("mooncake_client.py")
        if not binary.exists():
            raise RuntimeError(f"{binary} does not exist: {python} has no Mooncake wheel")
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-peer-"))
        port, metrics_port, metadata_port, client_port, node_port = own_ports(5)
        master = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [
                str(binary),
                f"--rpc_port={port}",
                f"--metrics_port={metrics_port}",
                "--rpc_thread_num=4",
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_port={metadata_port}",
                "--default_kv_lease_ttl=5000",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        wait_for(port)
        if path == TCP:
            node = ("node", master, str(NODE_MIB), str(node_port))
            PeerProcess(stack, python, script, *node).answer()
        own_mib = NODE_MIB if path == OWN_PROCESS else 0
        self._client = PeerProcess(
            stack,
            python,
            script,
            "client",
            master,
            str(own_mib),
            str(client_port),
            variables={"MC_STORE_MEMCPY": "1"} if path == OWN_PROCESS else None,
        )
        self._client.answer()

    def ask(self, way: str, *sizes_bytes: int) -> float:
        """Seconds of one call; mooncake_client.py lists the ways."""
        return float(self._client.ask(" ".join([way, *map(str, sizes_bytes)]))["s"])


def wait_for(port: int) -> None:
    until_s = time.monotonic() + START_S_MAX
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if time.monotonic() > until_s:
            raise RuntimeError(f"mooncake_master does not listen on port {port}")
        time.sleep(0.1)
