"""The options of `mooncake serve`, and the `HostPlan` that the launcher (launch.py) makes of them.

The plan of a single machine has Unix sockets and no etcd. It has no workers, because the launcher
starts a worker for each worker folder of the model repository. The plan of a deployment's host
comes from the cluster file (cluster/host_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from backends.cluster.host_plan import (
    DirectoryPlan,
    FrontendPlan,
    GatewayPlan,
    HostPlan,
    NodePlan,
    host_and_port,
)
from backends.model_settings.serve_settings import NO_SETTINGS, ServeSettings
from backends.tracing.export import ENDPOINT_VARIABLE
from backends.tracing.export import problems as trace_problems
from mooncake_store.cli.serving import (
    directory_address,
    directory_command,
    events_address,
    node_command,
)
from mooncake_store.process.bounded_log import LOG_BYTES_MAX, LOG_BYTES_MIN
from mooncake_store.process.logs import FORMAT_VARIABLE
from mooncake_store.transports.host_topology import TRUSTED_NICS

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ObserveOptions:
    """The logs and traces of a launch."""

    log_format: str = ""  # "text" or "json"; "" for that of the environment, which may be unset
    log_bytes_max: int = LOG_BYTES_MAX  # limit of each process's log; >= LOG_BYTES_MIN
    otlp_endpoint: str = ""  # URL of a trace collector; "" for that of the environment, if any

    def environment(self) -> dict[str, str]:
        """The environment variables that pass these options to the processes."""
        given = {FORMAT_VARIABLE: self.log_format, ENDPOINT_VARIABLE: self.otlp_endpoint}
        return {name: value for name, value in given.items() if value}

    def problems(self, environment: Mapping[str, str]) -> list[str]:
        """Every problem with its remedy. `environment`: the other variables of the processes."""
        found = trace_problems({**environment, **self.environment()})
        if self.log_bytes_max < LOG_BYTES_MIN:
            found.append(f"--log-bytes is {self.log_bytes_max}: give {LOG_BYTES_MIN} or more")
        return found


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of OpenAI's interface."""

    port: int = 0  # 0 if the interface is not served
    workers: int = 1  # number of gateway processes that share the port
    certificate: Path | None = None  # PEM file; None for plain HTTP
    private_key: Path | None = None  # PEM file; None for plain HTTP
    allowed_origins: str = ""  # origins of web pages that browsers let call it, comma separated

    def plan(self, address: str) -> GatewayPlan | None:
        if not self.port:
            return None
        files = [
            str(path.resolve()) if path else "" for path in (self.certificate, self.private_key)
        ]
        return GatewayPlan(f"{address}:{self.port}", self.workers, *files, self.allowed_origins)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options that a single machine and a deployment's host have in common."""

    is_self_checked: bool = False  # True if every process checks its invariants each second
    open_apis: tuple[str, ...] = ()  # APIs of Triton that need no admin key (triton_arguments.py)
    api_keys: Path | None = None  # file of tenants and API keys; None: MOONCAKE_API_KEYS, if set
    settings: ServeSettings = NO_SETTINGS  # settings for all models, which override config.pbtxt
    triton_args: tuple[str, ...] = ()  # further arguments of the frontend's tritonserver
    observed: ObserveOptions = ObserveOptions()
    gateway: GatewayOptions = GatewayOptions()  # only on a host with a frontend


@dataclass(frozen=True, slots=True)
class ServeOptions(LaunchOptions):
    """The options of `mooncake serve` on a single machine."""

    model_repository: Path
    address: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    metrics_address: str = LOOPBACK
    nodes: tuple[str, ...] = ("s0", "s1")
    store_bytes: int = 768 << 20  # DRAM of each storage node
    ssd_bytes: int = 0  # SSD space of each storage node; 0 without an SSD tier
    ssd_path: Path | None = None  # None for a folder in state_dir
    state_dir: Path = Path(".mooncake")
    ready_s_max: float = 300.0  # limit of the start in seconds

    def plan(self, socket_dir: Path) -> HostPlan:
        directory, events = directory_address(socket_dir), events_address(socket_dir)
        return HostPlan(
            deployment="",
            host=str(self.http_port),  # becomes a part of names of folders
            address=LOOPBACK,
            listen=LOOPBACK,
            folder=".",
            state_dir=str(self.state_dir.resolve()),
            model_repository=str(self.model_repository.resolve()),
            directory_address=directory,
            events_address=events,
            metrics=f"{self.metrics_address}:{self.metrics_port}",
            # Without other hosts, NIXL (over UCX) needs only the loopback interface. UCX's ports
            # check no keys, and UCX ends the process if a network card that it uses is removed.
            environment={TRUSTED_NICS: ""},
            directory=DirectoryPlan(
                listen=directory,
                listen_events=events,
                advertised=directory,
                advertised_events=events,
            ),
            storage_nodes=tuple(self._node(node, socket_dir) for node in self.nodes),
            frontend=FrontendPlan(
                http=f"{self.address}:{self.http_port}",
                grpc=f"{self.address}:{self.grpc_port}",
                gateway=self.gateway.plan(self.address),
            ),
        )

    def _node(self, name: str, socket_dir: Path) -> NodePlan:
        control = f"ipc://{socket_dir}/{name}"
        return NodePlan(
            name=name,
            control=control,
            listen_control=control,
            dram_bytes=self.store_bytes,
            ssd_bytes=self.ssd_bytes,
            ssd_path=str(self.ssd_path.resolve()) if self.ssd_path else "ssd",
        )


@dataclass(frozen=True, slots=True)
class HostOptions(LaunchOptions):
    """The options of `mooncake serve --cluster FILE --host NAME`, with the plan from the file."""

    host_plan: HostPlan
    ready_s_max: float = float("inf")  # seconds; no limit, because other hosts may start much later

    def plan(self, socket_dir: Path) -> HostPlan:
        frontend = self.host_plan.frontend
        if frontend is None:
            return self.host_plan
        gateway = self.gateway.plan(host_and_port(frontend.http)[0])
        return replace(self.host_plan, frontend=replace(frontend, gateway=gateway))


def fixed_ports(plan: HostPlan) -> dict[str, tuple[str, int]]:
    """Name of the listener -> (address, port), for every TCP port that the plan names."""
    found = {"metrics": plan.metrics}
    if plan.frontend is not None:
        found |= {"http": plan.frontend.http, "grpc": plan.frontend.grpc}
        if plan.gateway is not None:
            found["openai"] = plan.gateway.listen
    if plan.etcd is not None:
        found |= {"etcd": plan.etcd.listen_client_url, "etcd peer": plan.etcd.listen_peer_url}
    if plan.directory is not None:
        found["directory"] = plan.directory.listen
        found["directory events"] = plan.directory.listen_events
    for node in plan.storage_nodes:
        found[f"{node.name} control"] = node.listen_control
        found[f"{node.name} data"] = node.listen_data
    found |= {worker.model: worker.listen_grpc for worker in plan.workers}
    return {
        name: host_and_port(address)
        for name, address in found.items()
        if address and not address.startswith("ipc://")
    }


def command_of_directory(host: HostPlan, *options: str) -> list[str]:
    plan = host.directory
    assert plan is not None
    if plan.etcd:
        advertised = f"{plan.advertised},{plan.advertised_events}"
        election = ("--etcd", plan.etcd, "--ttl-s", str(plan.ttl_s), "--advertise", advertised)
        options = (*options, *election)
    return directory_command(plan.listen, plan.listen_events, *options)


def command_of_node(
    host: HostPlan, node: NodePlan, segment_path: str, state_dir: Path
) -> list[str]:
    options = ["--segment-path", segment_path]
    if node.data:
        options += ["--data", node.listen_data, "--rack", node.rack]
        options += ["--advertise", f"{node.control},{node.data}"]
    return node_command(
        host.directory_address,
        node.name,
        node.dram_bytes,
        node.listen_control,
        state_dir / node.ssd_path,
        node.ssd_bytes,
        host.events_address,
        *options,
    )
