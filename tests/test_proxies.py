"""No client of ours sends a connection to this machine through a proxy of the environment.

Every variable that a client library may read names a listener that records what connects to it. The
targets are ports of loopback where nothing listens, so each client fails, and the listener must
have seen nothing. Clients of people (the package `openai`, curl) decide for themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import direct_http
from backends.cluster.manifests import compose
from backends.cluster.status import _answers
from backends.doctor.running_check import timed_request
from backends.frontend.grpc_calls import GrpcCalls
from backends.gateway.frontend_calls import FrontendCalls
from backends.launcher.etcd_member import _cluster_call, ask_etcd
from backends.launcher.repository import ready_by_grpc, ready_by_http
from backends.metrics.status.readings import fetch_page as fetch_status
from backends.model_settings.running_system import ask_at
from backends.tensors import CLUSTER
from backends.tracing.request_spans import SpanRecord
from backends.tracing.trace_context import TraceContext
from bench import leaks
from bench.clients.keyed_gateway import running_gateway
from bench.harness.fleet.served_fleet import not_ready
from loadtest.client import sse_client
from loadtest.client.http_interfaces import OpenAiInterface
from loadtest.client.metrics_page import fetch_page
from loadtest.client.openai_server import http_address, served_at
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.client.server import addresses_of
from loadtest.client.triton_client import TritonClient
from loadtest.harness.server import gateway_is_ready, model_states
from mooncake_store.directory.etcd import EtcdClient

ROOT = Path(__file__).parents[1]
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
EXCEPTIONS = ("no_proxy", "no_grpc_proxy")
WAIT_S = 20.0


class RecordingProxy:
    """Keeps the first line of every connection, and closes it."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(WAIT_S)
                    self.seen.append(connection.recv(4096).decode("latin-1").partition("\r")[0])

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingProxy]:
    made = RecordingProxy()
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first use
    for name in PROXIES:
        monkeypatch.setenv(name, made.url)
        monkeypatch.setenv(name.upper(), made.url)
    for name in EXCEPTIONS:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    yield made
    made.close()


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port where nothing listens, and nothing else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def _ask_triton(address: str) -> None:
    async with TritonClient(address) as client:
        await client.model_parameters()


async def _probe_frontend(address: str) -> None:
    calls = FrontendCalls(address)
    try:
        await calls.describe(CLUSTER, {})
    finally:
        await calls.close()


async def _generate_sse(address: str) -> None:
    client = sse_client.SseClient(http_address(f"http://{address}"), OpenAiInterface())
    async for _ in client.generate(GenerateRequest("one", text_input="a"), 5.0):
        pass


def _call_worker(address: str) -> None:
    calls = GrpcCalls()
    try:
        for _ in calls(address, "prefill_0", {"a": np.zeros(1, np.int32)}, ["b"], "one"):
            pass
    finally:
        calls.close()


def _send_spans(endpoint: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    from backends.tracing.otlp import OtlpSender

    sender = OtlpSender(endpoint)
    sender._exporter._timeout = 1
    try:
        sender.send([SpanRecord("one", TraceContext("a" * 32, "b" * 16, True), "", 0, 1)])
    finally:
        sender.stop()


def _healthcheck(address: str) -> None:
    """The health check of the rendered Compose file. Docker gives containers its own proxies."""
    plan: Any = type("Plan", (), {"metrics": address})
    script = compose._ask(plan)
    subprocess.run([sys.executable, "-c", script], check=False, stderr=subprocess.DEVNULL)


CLIENTS: dict[str, Callable[[str], object]] = {
    "direct_http": lambda address: direct_http.get(f"http://{address}/metrics", "key", 5.0),
    "cluster status": lambda address: _answers(f"http://{address}/health"),
    "compose health check": _healthcheck,
    "doctor": timed_request,
    "etcd": lambda address: EtcdClient([f"http://{address}"], timeout_s=1.0).get("key"),
    "etcd members": lambda address: _cluster_call(address, "list", {}),
    "etcd quorum": lambda address: ask_etcd([address]),
    "frontend to worker": _call_worker,
    "frontend probes worker": lambda address: GrpcCalls().probe(address),
    "gateway": lambda address: asyncio.run(_probe_frontend(address)),
    "harness": lambda address: model_states(addresses_of(following(address, -1))),
    "harness of fleets": not_ready,
    "launcher, gRPC": lambda address: ready_by_grpc(address, "conductor"),
    "launcher, HTTP": lambda address: ready_by_http(address, "conductor"),
    "leaks bench": lambda address: leaks.posted(f"http://{address}/", {}, False),
    "load test, gRPC": lambda address: asyncio.run(_ask_triton(address)),
    "load test, models": lambda address: served_at(http_address(f"http://{address}")),
    "load test, page": lambda address: fetch_page(f"http://{address}/metrics"),
    "load test, SSE": lambda address: asyncio.run(_generate_sse(address)),
    "public clients": lambda address: running_gateway(f"http://{address}/v1"),
    "settings": lambda address: ask_at(f"http://{address}/metrics")(),
    "status": lambda address: fetch_status(f"http://{address}/metrics"),
    "traces": _send_spans,
    "traces, URL": lambda address: _send_spans(f"http://{address}"),
    "users": gateway_is_ready,
}


def following(address: str, step: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + step}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_reaches_loopback_without_the_proxies_of_the_environment(
    name: str, host: str, proxy: RecordingProxy, nobody: int
) -> None:
    try:
        CLIENTS[name](f"{host}:{nobody}")
    except (AttributeError, NameError, TypeError):  # a mistake of this test
        raise
    except Exception as error:  # Catch all: clients raise different types here
        print(error)
    assert proxy.seen == []


USERS = """
import sys
from loadtest.client.http_interfaces import OpenAiInterface, TritonInterface
from loadtest.client.openai_server import http_address
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.users.senders import GrpcSender, HttpSender
address = sys.argv[1]
for sender in (
    GrpcSender(address, "conductor", lambda: 0.0),
    HttpSender(http_address(f"http://{address}"), TritonInterface("conductor"), lambda: 0.0),
    HttpSender(http_address(f"http://{address}"), OpenAiInterface(), lambda: 0.0),
):
    try:
        list(sender.send(GenerateRequest("one", text_input="a"), 5.0))
    except ServerError as error:
        print("asked", error.kind)
"""


@pytest.mark.slow
def test_users_reach_loopback_without_the_proxies_of_the_environment(
    proxy: RecordingProxy, nobody: int
) -> None:
    """In a process of its own: gevent replaces its blocking calls."""
    command = [sys.executable, "-c", USERS, f"localhost:{nobody}"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.stdout.count("asked") == 3, ran.stderr
    assert proxy.seen == []


@pytest.mark.parametrize("excepted", ["", "203.0.113.7", "example.org,203.0.113.0/24"])
def test_a_load_test_over_grpc_follows_no_proxy_to_other_hosts(
    excepted: str, proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is of TEST-NET-3, which no host has."""
    monkeypatch.setenv("no_proxy", excepted)

    async def ask() -> None:
        with contextlib.suppress(asyncio.TimeoutError, ServerError):
            await asyncio.wait_for(_ask_triton("203.0.113.7:8001"), 2.0)

    asyncio.run(ask())
    assert any("203.0.113.7:8001" in line for line in proxy.seen) is (not excepted)


ASKS_PROXIES = re.compile(r"\burlopen\(|(?<![.\w])requests\.\w+\(|\b(in)?secure_channel\(")
# The clients above call these, each with its own answer to the environment.
TRIED = {
    "backends/gateway/frontend_calls.py",
    "backends/worker_tls.py",
    "bench/leaks.py",
    "loadtest/client/triton_client.py",
    "loadtest/users/senders.py",
    "mooncake_store/directory/etcd.py",
}


def test_no_other_module_calls_what_asks_the_proxies_of_the_environment() -> None:
    """A new client uses backends/direct_http.py, or is tried above."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("backends", "bench", "conductor", "loadtest", "mooncake_store", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if ASKS_PROXIES.search(path.read_text())
    }
    assert found == TRIED
