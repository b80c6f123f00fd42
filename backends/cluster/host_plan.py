"""The plan of one host of a deployment: its processes with addresses, sizes and environment.

The plan of a single machine is made in launcher/launch_plan.py. A process binds the addresses whose
fields are named `listen...`. Other processes connect to the address without this prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.cluster.deployment import Deployment, Host, NodeSpec, PoolSpec, WorkerSpec


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """An etcd member that this host starts, with its URLs in etcd's format."""

    name: str  # name of the host
    listen_client_url: str
    advertised_client_url: str
    listen_peer_url: str
    advertised_peer_url: str
    initial_cluster: str  # NAME=PEER-URL of each member, separated by commas
    token: str  # identifies the etcd cluster, so that members of other deployments cannot join


@dataclass(frozen=True, slots=True)
class DirectoryPlan:
    """A directory that this host starts. With etcd, it serves while it is the elected leader."""

    listen: str  # tcp://HOST:PORT; on a single machine ipc://PATH
    listen_events: str
    advertised: str
    advertised_events: str
    etcd: str = ""  # address of the election, etcd://...; "" without an election
    ttl_s: int = 0  # seconds of the leader's lease in etcd, if there is an election


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A storage node that this host starts."""

    name: str
    control: str  # tcp://HOST:PORT; on a single machine ipc://PATH
    listen_control: str
    dram_bytes: int
    ssd_bytes: int  # 0: no SSD tier
    ssd_path: str  # relative paths start at state_dir
    data: str = ""  # HOST:PORT for KV transfers; "" on a single machine
    listen_data: str = ""
    segment_path: str = ""  # file of the node's KV memory; "": a file of the launcher in /dev/shm
    rack: str = ""  # nodes with the same label have a short network path; "": no label


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The gateway: OpenAI's interface in front of this host's frontend."""

    listen: str  # HOST:PORT, shared by all processes of the gateway
    processes: int = 1
    certificate: str = ""  # path of a PEM file; "" for plain HTTP
    private_key: str = ""  # path of a PEM file; "" for plain HTTP
    allowed_origins: str = ""  # origins of web pages, comma separated


@dataclass(frozen=True, slots=True)
class FrontendPlan:
    """The addresses at which clients reach this host's frontend, each HOST:PORT."""

    http: str
    grpc: str
    gateway: GatewayPlan | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A worker, which runs in a Triton of its own."""

    model: str  # name of the worker and of its Triton model
    pool: str
    role: str  # prefill | decode
    grpc: str  # HOST:PORT that frontends call
    listen_grpc: str
    store_node: str  # storage node on this host, to which the worker writes KV
    parameters: Mapping[str, str]  # parameters of its config.pbtxt except store_node


@dataclass(frozen=True, slots=True)
class HostPlan:
    """All processes of one host. Relative paths start at `folder`."""

    deployment: str  # name of the deployment; "" on a single machine
    host: str  # name of the host; on a single machine the frontend's HTTP port
    address: str  # address without port to which other hosts connect
    listen: str  # address without port that this host's processes bind
    folder: str  # folder of the cluster file; "." on a single machine
    state_dir: str
    model_repository: str
    directory_address: str  # tcp://, ipc:// or etcd://, for all clients of the directory
    events_address: str  # of the directory's events; "" if the elected leader announces it
    metrics: str  # HOST:PORT of this host's metrics page
    etcd: EtcdMember | None = None
    directory: DirectoryPlan | None = None
    storage_nodes: tuple[NodePlan, ...] = ()
    frontend: FrontendPlan | None = None
    workers: tuple[WorkerPlan, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # set in all processes

    @property
    def shm_bytes(self) -> int:
        """Size of the storage nodes' memory in /dev/shm. Segments in other folders do not count."""
        return sum(
            node.dram_bytes
            for node in self.storage_nodes
            if not node.segment_path or node.segment_path.startswith("/dev/shm/")
        )

    @property
    def gateway(self) -> GatewayPlan | None:
        return self.frontend.gateway if self.frontend is not None else None

    @property
    def is_idle(self) -> bool:
        parts = (self.etcd, self.directory, self.storage_nodes, self.frontend, self.workers)
        return not any(parts)


def host_plan(deployment: Deployment, name: str) -> HostPlan:
    """The plan of a host of the file; KeyError for another name."""
    host = deployment.hosts[name]
    is_frontend = name in deployment.frontends.hosts
    frontends, step = deployment.frontends, deployment.port_step(name)
    return HostPlan(
        **_common(deployment, host, step),
        etcd=_etcd_member(deployment, host),
        directory=_directory(deployment, host),
        storage_nodes=tuple(_node(node, host) for node in deployment.nodes_of(name)),
        frontend=FrontendPlan(
            http=_at(frontends.address, frontends.http_port + step),
            grpc=_at(frontends.address, frontends.grpc_port + step),
        )
        if is_frontend
        else None,
        workers=tuple(
            _worker(worker, pool, host)
            for pool in deployment.pools
            for worker in pool.workers
            if worker.host == name
        ),
    )


def pool_host_plan(deployment: Deployment, pool_name: str, name: str, address: str) -> HostPlan:
    """The plan of an elastic host, which is not in the cluster file and has this name and address.
    It has one worker of the elastic pool, and the storage node to which the worker writes KV.
    Raises KeyError if there is no elastic pool of this name."""
    pool = {pool.name: pool for pool in deployment.elastic_pools}[pool_name]
    assert pool.elastic is not None
    host = Host(name=name, address=address, listen=address, state_dir=f".mooncake/{name}")
    node = NodeSpec(name, host=name, dram_bytes=pool.elastic.dram_bytes)
    worker = WorkerSpec(
        model=f"{pool.name}_{name}_0", host=name, grpc_port=pool.grpc_port, store_node=name
    )
    return HostPlan(
        **_common(deployment, host),
        storage_nodes=(_node(node, host),),
        workers=(_worker(worker, pool, host),),
    )


def needs_own_gpus(parameters: Mapping[str, str]) -> bool:
    """True if the worker's engine takes GPUs that no other worker can use: TensorRT-LLM always, and
    vLLM unless its `device` is cpu."""
    engine = parameters.get("engine", "")
    is_on_cpu = parameters.get("device", "cpu") == "cpu"
    return engine == "tensorrt_llm" or (engine == "vllm" and not is_on_cpu)


def gpus_of(workers: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Model -> CUDA devices, for the workers of one host that need own GPUs. `workers` maps each
    model to its parameters. A worker without `gpus` gets the first tp_size free devices."""
    on_gpus = {model: raw for model, raw in workers.items() if needs_own_gpus(raw)}
    named = {gpu.strip() for raw in on_gpus.values() for gpu in raw.get("gpus", "").split(",")}
    free = (number for number in itertools.count() if str(number) not in named)
    return {
        model: raw.get("gpus")
        or ",".join(str(next(free)) for _ in range(int(raw.get("tp_size", "1"))))
        for model, raw in on_gpus.items()
    }


def election_address(deployment: Deployment) -> str:
    """The address of the directories' election in etcd; "" without etcd."""
    endpoints = deployment.etcd_endpoints()
    if not endpoints:
        return ""
    return f"etcd://{','.join(endpoints)}/mooncake/{deployment.name}/directory"


def directory_address(deployment: Deployment) -> str:
    """The value of MOONCAKE_DIRECTORY for all processes and commands."""
    if elected := election_address(deployment):
        return elected
    host = deployment.hosts[deployment.directories.hosts[0]]
    return _tcp(host.address, deployment.directories.port)


def _events_address(deployment: Deployment) -> str:
    if deployment.etcd is not None:
        return ""
    host = deployment.hosts[deployment.directories.hosts[0]]
    return _tcp(host.address, deployment.directories.events_port)


def _common(deployment: Deployment, host: Host, step: int = 0) -> dict[str, Any]:
    frontends = deployment.frontends
    return {
        "deployment": deployment.name,
        "host": host.name,
        "address": host.address,
        "listen": host.listen,
        "folder": deployment.folder,
        "state_dir": host.state_dir,
        "model_repository": f"rendered/{host.name}/model_repository",
        "directory_address": directory_address(deployment),
        "events_address": _events_address(deployment),
        "metrics": _at(frontends.metrics_address, frontends.metrics_port + step),
        "environment": _environment(deployment, host),
    }


def _environment(deployment: Deployment, host: Host) -> dict[str, str]:
    found = dict(host.environment)
    found["MOONCAKE_DIRECTORY"] = directory_address(deployment)
    found["MOONCAKE_EVENTS"] = _events_address(deployment)
    found["MOONCAKE_ADDRESS"] = host.address
    is_elastic = bool(deployment.elastic_pools)
    peers = [each.address for each in deployment.hosts.values()]
    found["MOONCAKE_PEERS"] = "*" if is_elastic else ",".join(peers)
    if host.listen != host.address:
        found["MOONCAKE_LISTEN"] = host.listen
    if host.identity:
        found["MOONCAKE_HOST_IDENTITY"] = host.identity
    if deployment.is_insecure:
        found["MOONCAKE_INSECURE"] = "1"
    if deployment.keys_folder:
        is_absolute = deployment.keys_folder.startswith("/")
        base = "" if is_absolute else f"{deployment.folder}/"
        found["MOONCAKE_KEYS"] = base + deployment.keys_folder
    if deployment.trusted_data_network is not None:
        found["MOONCAKE_TRUSTED_NICS"] = ",".join(deployment.trusted_data_network)
    return found


def _etcd_member(deployment: Deployment, host: Host) -> EtcdMember | None:
    etcd = deployment.etcd
    if etcd is None or host.name not in etcd.hosts:
        return None
    scheme = "https" if deployment.keys_folder else "http"
    return EtcdMember(
        name=host.name,
        listen_client_url=f"{scheme}://{_at(host.listen, etcd.client_port)}",
        advertised_client_url=f"{scheme}://{_at(host.address, etcd.client_port)}",
        listen_peer_url=f"{scheme}://{_at(host.listen, etcd.peer_port)}",
        advertised_peer_url=f"{scheme}://{_at(host.address, etcd.peer_port)}",
        initial_cluster=",".join(
            f"{name}={scheme}://{_at(deployment.hosts[name].address, etcd.peer_port)}"
            for name in etcd.hosts
        ),
        token=f"mooncake-{deployment.name}",
    )


def _directory(deployment: Deployment, host: Host) -> DirectoryPlan | None:
    directories = deployment.directories
    if host.name not in directories.hosts:
        return None
    return DirectoryPlan(
        listen=_tcp(host.listen, directories.port),
        listen_events=_tcp(host.listen, directories.events_port),
        advertised=_tcp(host.address, directories.port),
        advertised_events=_tcp(host.address, directories.events_port),
        etcd=election_address(deployment),
        ttl_s=directories.ttl_s,
    )


def _node(node: NodeSpec, host: Host) -> NodePlan:
    return NodePlan(
        name=node.name,
        control=_tcp(host.address, node.control_port),
        listen_control=_tcp(host.listen, node.control_port),
        data=_at(host.address, node.data_port),
        listen_data=_at(host.listen, node.data_port),
        dram_bytes=node.dram_bytes,
        ssd_bytes=node.ssd_bytes,
        ssd_path=node.ssd_path,
        segment_path=node.segment_path,
        rack=host.rack,
    )


def _worker(worker: WorkerSpec, pool: PoolSpec, host: Host) -> WorkerPlan:
    parameters = {**pool.parameters, **worker.parameters}
    parameters.pop("store_node", None)
    return WorkerPlan(
        model=worker.model,
        pool=pool.name,
        role=pool.role,
        grpc=_at(host.address, worker.grpc_port),
        listen_grpc=_at(host.listen, worker.grpc_port),
        store_node=worker.store_node,
        parameters=parameters,
    )


def _tcp(address: str, port: int) -> str:
    return f"tcp://{_at(address, port)}"


def _at(address: str, port: int) -> str:
    return f"{address}:{port}"


def reached_at(listen: str, address: str) -> str:
    """HOST:PORT at which callers reach a listener bound to `listen`. `address` replaces 0.0.0.0."""
    host, port = host_and_port(listen)
    return _at(address if host == "0.0.0.0" else host, port)


def host_and_port(address: str) -> tuple[str, int]:
    """(HOST, PORT) of [SCHEME://]HOST:PORT."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    return host, int(port)
