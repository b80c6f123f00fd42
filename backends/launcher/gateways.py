"""The gateway processes of a host, which serve OpenAI's interface in front of the frontend.

All gateway processes listen on one port (backends/gateway). A process that dies loses its own
connections and is restarted. Other processes of the host are not affected. Each process serves its
metrics on a loopback port of its own, for the launcher's metrics page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from backends.cluster.host_plan import HostPlan, host_and_port, reached_at
from backends.extras import install_line, missing
from backends.launcher.environment import free_ports
from backends.launcher.metrics_server import MetricsSource
from backends.launcher.triton_process import PROMISED, Restart, promised_ports, restarts_of
from backends.tenants import api_keys
from mooncake_store.keys.curve import INSECURE_VARIABLE, is_loopback
from mooncake_store.process.child_processes import (
    ChildProcess,
    Command,
    GrowingPauses,
    RestartPolicy,
)

READY_S_MAX = 60.0  # limit in seconds of a gateway's start, during which Tritons load models too
DRAIN_S_MAX = 30.0  # limit in seconds of a gateway's drain; a stop of the launcher is shorter
UNGUARDED = (
    "can be reached from other hosts without API keys, so every client could use it. "
    f"Name a file of keys (--api-keys), listen on a loopback address, or set {INSECURE_VARIABLE}=1 "
    "if that is what you want"
)
LOOPBACK = "127.0.0.1"
Make = Callable[[str, Callable[[], Command], RestartPolicy], ChildProcess]


def problems(plan: HostPlan, env: Mapping[str, str]) -> list[str]:
    """The problems of the planned gateway, if there is one. `env`: its environment variables."""
    gateway = plan.gateway
    if gateway is None:
        return []
    found = []
    if lacking := missing("gateway"):
        found.append(f"the gateway needs {lacking}: {install_line('gateway')}")
    is_open = not is_loopback(gateway.listen) and env.get(INSECURE_VARIABLE) != "1"
    if is_open and not env.get(api_keys.VARIABLE):
        found.append(f"{gateway.listen} {UNGUARDED}")
    for origin in filter(None, gateway.allowed_origins.split(",")):
        if origin.strip().rstrip("/") == "*" and not env.get(api_keys.VARIABLE):
            found.append(
                "--allowed-origins *: with it, every web page could use this server; name "
                "the pages' origins, or a file of keys (--api-keys)"
            )
    if bool(gateway.certificate) != bool(gateway.private_key):
        found.append("--openai-certificate and --openai-private-key belong together: name both")
    for path in (gateway.certificate, gateway.private_key):
        if path and not Path(path).is_file():
            found.append(f"the gateway's TLS file {path} does not exist")
    return found


class Gateways:
    """Starts and supervises the gateway processes of a plan, if there are any."""

    def __init__(self, plan: HostPlan, env: Mapping[str, str], make: Make) -> None:
        self._plan, self._env = plan.gateway, env
        self._own_ports: dict[str, int] = {}
        self.children: list[ChildProcess] = []
        if self._plan is None:
            return
        assert plan.frontend is not None
        self._frontend = reached_at(plan.frontend.grpc, LOOPBACK)
        self._metrics = reached_at(plan.metrics, LOOPBACK)
        for number in range(self._plan.processes):
            name = f"gateway-{number}"
            self.children.append(make(name, partial(self._command, name), GrowingPauses()))

    @property
    def url(self) -> str:
        """The URL for callers on this host; "" without a gateway."""
        if self._plan is None:
            return ""
        scheme = "https" if self._plan.certificate else "http"
        return f"{scheme}://{reached_at(self._plan.listen, LOOPBACK)}"

    def wait_ready(self) -> None:
        """Wait until all processes listen. Raises ChildDied if one ends or exceeds READY_S_MAX."""
        for child in self.children:
            child.wait_for_line("ready", READY_S_MAX)

    def supervise(self) -> list[Restart]:
        return restarts_of(self.children)

    def sources(self) -> list[MetricsSource]:
        return [
            MetricsSource(child.name, child.starts, f"{LOOPBACK}:{self._own_ports[child.name]}")
            for child in self.children
            if child.is_alive
        ]

    def _command(self, name: str) -> Command:
        plan = self._plan
        assert plan is not None
        [own_port] = PROMISED[name] = free_ports(1, promised_ports())
        self._own_ports[name] = own_port
        host, port = host_and_port(plan.listen)
        given = {
            "--name": name,
            "--frontend": self._frontend,
            "--host": host,
            "--port": str(port),
            "--metrics": self._metrics,
            "--own-metrics-port": str(own_port),
            "--drain-s-max": str(DRAIN_S_MAX),
        }
        if folder := self._env.get("MOONCAKE_SOCKETS"):  # private, and gone with the launcher
            given["--stored-responses"] = f"{folder}/responses.sqlite"
        options = [part for pair in given.items() for part in pair]
        options += ["--shared"] if plan.processes > 1 else []
        if plan.certificate:
            options += ["--certificate", plan.certificate, "--private-key", plan.private_key]
        if plan.allowed_origins:
            options += ["--allowed-origins", plan.allowed_origins]
        return Command([sys.executable, "-m", "backends.gateway", *options], self._env)
