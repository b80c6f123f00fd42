"""What stands in for the machine while a simulation runs: every module of the product that names a
clock, a thread, a socket, a lock, a mapped file, NIXL or etcd gets the simulated one in its place.

By identity, in all loaded modules of the product: so a module that is new is on stage as well, and
nothing of it is copied here.

Not here: the stand-ins themselves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import os
import queue
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import zmq

from backends.frontend.grpc_calls import GrpcCalls
from backends.text.tokenizer import Tokenizer
from backends.workers import machine_profile
from mooncake_store.directory import server
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.etcd import EtcdClient
from mooncake_store.memory.segment import Segment, host_id
from mooncake_store.transports.host_topology import host_data_network, topology_json
from mooncake_store.transports.nixl_agent import NodeAgent
from mooncake_store.transports.nixl_transport import NixlTransport
from tests.fuzz_serve import calls, engine, etcd, green, memory, promises, sockets
from tests.fuzz_serve.loop import Loop

PACKAGES = ("backends.", "conductor.", "mooncake_store.")
PRODUCT = (
    "backends.frontend.frontend",
    "backends.workers.decode_worker",
    "backends.workers.prefill_worker",
    "backends.workers.step_driver",
    "conductor.conductor",
    "mooncake_store.client.client",
    "mooncake_store.directory.election",
    "mooncake_store.directory.__main__",
    "mooncake_store.directory.server",
    "mooncake_store.node.__main__",
    "mooncake_store.node.node",
)
PROFILE = machine_profile.MachineProfile((0.004, 2e-4, 0.0), (0.004, 5e-4, 1e-6), 0.0)
# How late a thread that has nothing to do notices that: longer ones cost a simulation less.
IDLE = {
    ("backends.workers.worker", "IDLE_WAIT_S"): 1.0,
    ("mooncake_store.directory.event_feed", "POLL_S"): 1.0,
    ("mooncake_store.wire.mailbox", "POLL_MS"): 5_000,
    ("mooncake_store.directory.election", "STEP_S"): 0.4,
    ("backends.frontend.routing_notes", "NOTES_S"): 0.4,
    ("mooncake_store.directory.server", "TICK_S"): 0.25,
    ("mooncake_store.transports.mapped_transport", "LOOK_S"): 1.0,
    ("mooncake_store.transports.rates", "PROBE_BYTES"): 8192,
    ("mooncake_store.transports.rates", "ROUNDS"): 1,
    ("backends.workers.decode_worker", "REPLIERS"): 2,
    ("backends.frontend.cluster_view", "TICK_S"): 1.0,
    ("backends.workers.worker_process", "REPORT_S"): 1.0,
}


class GreenOs:
    """The module `os`: with the environment of the process that asks, and its end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @property
    def environ(self) -> dict[str, str]:
        process = green.in_process()
        found: dict[str, str] = process.state.get("environ", {}) if process else {}
        return found

    def getpid(self) -> int:
        return 1

    def eventfd(self, *_: int) -> sockets.Wakeup:
        return sockets.Wakeup()

    def eventfd_read(self, wakeup: sockets.Wakeup) -> None:
        wakeup.is_ready = False

    def eventfd_write(self, wakeup: sockets.Wakeup, _: int) -> None:
        wakeup.wake()

    def close(self, descriptor: Any) -> None:
        if not isinstance(descriptor, sockets.Wakeup):
            os.close(descriptor)

    def _exit(self, _: int) -> None:
        green.end_own_process()


def _hex(digits: int) -> str:
    return f"{green.loop().rng.getrandbits(4 * digits):0{digits}x}"


def _host_id(path: str) -> str:
    process = green.in_process()
    return process.host if process is not None else ""


# A copy within a host takes no virtual time, and a rate is bytes by time.
STOPWATCH = SimpleNamespace(
    monotonic=green.monotonic,
    perf_counter=lambda: green.monotonic() + 1e-6 * next(green.loop().looks),
    sleep=green.sleep,
)
UUID = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=_hex(32)))
SECRETS = SimpleNamespace(token_hex=lambda n=16: _hex(2 * n))
PROFILES = SimpleNamespace(
    load_or_measure=lambda *_: PROFILE, MachineProfile=machine_profile.MachineProfile
)
NETWORK = SimpleNamespace(nics=(), missing=(), is_closed=False, shared_devices=None)
STAND_INS: list[tuple[Any, Any]] = [
    (time, green.TIME),
    (threading, green.THREADING),
    (queue, green.QUEUE),
    (zmq, sockets.ZMQ),
    (concurrent.futures.ThreadPoolExecutor, green.ThreadPoolExecutor),
    (concurrent.futures.Future, green.Future),
    (concurrent.futures.wait, green.wait),
    (uuid, UUID),
    (secrets, SECRETS),
    (os, GreenOs()),
    (machine_profile, PROFILES),
    (Segment, memory.GreenSegment),
    (host_id, _host_id),
    (NixlTransport, memory.GreenNixl),
    (topology_json, lambda: ""),
    (NodeAgent, memory.GreenAgent),
    (Tokenizer, engine.GreenTokenizer),
    (GrpcCalls, calls.GreenCalls),
    (Directory, promises.WatchedDirectory),
    (EtcdClient, etcd.EtcdClient),
    (host_data_network, lambda: NETWORK),
]
STAND_INS += [
    (getattr(module, name), stand_in)  # of who imports the names alone
    for module, stand_ins in ((threading, green.THREADING), (queue, green.QUEUE))
    for name, stand_in in vars(stand_ins).items()
    if name not in ("Full", "Empty")
]
_changed: list[tuple[Any, str, Any]] = []
_MISSING = object()


def _set(owner: Any, name: str, value: Any) -> None:
    _changed.append((owner, name, getattr(owner, name, _MISSING)))
    setattr(owner, name, value)


def _restore() -> None:
    while _changed:
        owner, name, value = _changed.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


@contextlib.contextmanager
def on_stage() -> Iterator[None]:
    """Product code meets the stand-ins until this ends."""
    for name in PRODUCT:
        importlib.import_module(name)
    by_identity = {id(real): stand_in for real, stand_in in STAND_INS}
    try:
        for name, module in list(sys.modules.items()):
            if not name.startswith(PACKAGES) or module is None:
                continue
            for attribute, value in list(vars(module).items()):
                if id(value) in by_identity:
                    _set(module, attribute, by_identity[id(value)])
        for (module_name, attribute), value in IDLE.items():
            _set(importlib.import_module(module_name), attribute, value)
        for main in ("mooncake_store.directory.__main__", "mooncake_store.node.__main__"):
            _set(sys.modules[main], "print", lambda *_, **__: None)
        _set(sys.modules["mooncake_store.transports.rates"], "time", STOPWATCH)
        _set(server.TurnClock.__init__, "__defaults__", (green.monotonic,))
        yield
    finally:
        _restore()


def begin(world: Loop, exchange: sockets.Exchange) -> tuple[memory.Memories, etcd.EtcdStore]:
    """A new simulation begins on the stage."""
    green.enter(world)
    network = exchange.network
    memories, store = memory.Memories(network), etcd.EtcdStore(network)
    sockets.Context._exchange = exchange
    memory.GreenSegment.memories = memory.GreenNixl.memories = memories
    etcd.EtcdClient.store = store
    calls.GreenCalls.tritons = {}
    return memories, store


__all__ = ["begin", "on_stage"]
