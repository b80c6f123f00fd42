"""A Kustomize base for a deployment whose hosts are pods.

A host of the cluster file is a pod of a StatefulSet. The host is named NAME-NUMBER, and its address
NAME-NUMBER.NAME comes from the headless Service NAME. An elastic pool is a Deployment, whose pods
are hosts that are not in the file. All pods read the same cluster file from a ConfigMap. The name
of the ConfigMap changes with its content, so an edit causes a rolling update. The base has

    hosts NAME-0, NAME-1 ...  StatefulSet, headless Service, PodDisruptionBudget
    hosts with frontends      a Service for clients
    pools with `elastic`      Deployment, PodDisruptionBudget
    ports                     NetworkPolicies

The Secrets with the keys from `mooncake keys` are not part of the base. Monitoring and autoscaling
are a separate Kustomize component.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from backends.cluster.deployment import ClusterFileInvalid, Deployment, PoolSpec, is_loopback
from backends.cluster.host_plan import HostPlan, host_plan, pool_host_plan
from backends.cluster.manifests.pods import (
    API_KEYS,
    API_KEYS_FILE,
    GRPC,
    HTTP,
    METRICS,
    NO_GATEWAY,
    OPENAI,
    STATE_FOLDER,
    Document,
    PodGateway,
    documents_text,
    labels,
    metrics_port,
    pod,
    resource,
    selector,
)

POD_HOST = re.compile(r"(?P<group>[a-z][a-z0-9-]*?)-(?P<number>0|[1-9]\d*)")
STATE_BYTES = 8 << 30  # volume size for logs and etcd's data, in addition to the SSD tier
LIVE, WAITING = "mooncake_requests_live", "mooncake_requests_waiting"  # docs/metrics.md
INSTANCE = "app.kubernetes.io/instance"
SERIES_LABEL = "app_kubernetes_io_instance"  # the same label in Prometheus
LIVE_PER_WORKER = 16  # autoscaling target: live requests of the deployment per worker of the pool
WAITING_PER_WORKER = 4  # autoscaling target: requests that wait per worker of the pool
CALM_S = 300  # seconds of low load before a pool shrinks, because each removal moves requests


def kustomize_base(
    deployment: Deployment, text: str, gateway: PodGateway = NO_GATEWAY
) -> dict[str, str]:
    """Name -> text of each file of the base. `text`: the text of the cluster file. Raises
    ClusterFileInvalid if the hosts cannot be pods, or if the gateway's options do not fit."""
    _check_gateway(deployment, gateway)
    groups = _groups(deployment)
    files = {"cluster.yaml": text}
    for name, plans in groups.items():
        files[f"{name}.yaml"] = documents_text(_group(deployment, name, plans, gateway))
    for pool in deployment.elastic_pools:
        if pool.name in groups:
            what = f"pools.{pool.name}: is also a group of hosts ({pool.name}-0): rename one"
            raise ClusterFileInvalid(deployment.path, (what,))
        files[f"{pool.name}.yaml"] = documents_text(_pool(deployment, pool))
    files["network-policies.yaml"] = documents_text(_network_policies(deployment, groups, gateway))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name for name in files if name != "cluster.yaml"],
        "configMapGenerator": [{"name": "cluster-file", "files": ["cluster.yaml"]}],
    }
    return files | {"kustomization.yaml": documents_text([kustomization])}


def _check_gateway(deployment: Deployment, gateway: PodGateway) -> None:
    problems = []
    if gateway.openai_port and not gateway.has_api_keys:
        problems.append("--openai-port: other hosts can reach pods, so it needs --api-keys")
    if not gateway.openai_port and not gateway.opens_triton:
        problems.append(
            "--api-keys: without --openai-port clients have only Triton's ports, which check no "
            "keys: give --openai-port, or set keyless to refused in the file of keys"
        )
    taken = [
        deployment.frontends.http_port,
        deployment.frontends.grpc_port,
        deployment.frontends.metrics_port,
    ]
    if gateway.openai_port in taken:
        problems.append(f"--openai-port: frontends use {gateway.openai_port} already: give another")
    if problems:
        raise ClusterFileInvalid(deployment.path, tuple(problems))


def _groups(deployment: Deployment) -> dict[str, list[HostPlan]]:
    """StatefulSet -> plans of its hosts. Raises ClusterFileInvalid if the hosts cannot be pods."""
    found: dict[str, list[HostPlan]] = {}
    problems = []
    for name, host in deployment.hosts.items():
        match = POD_HOST.fullmatch(name)
        if match is None:
            problems.append(f"hosts.{name}: pods of a StatefulSet are named NAME-0, NAME-1 ...")
            continue
        group, number = match["group"], int(match["number"])
        address = f"{name}.{group}"
        if host.address != address and not host.address.startswith(address + "."):
            problems.append(f"hosts.{name}.address: is {host.address}; a pod's is {address}")
        if not f"{host.state_dir}/".startswith(f"{STATE_FOLDER}/"):
            problems.append(f"hosts.{name}.state_dir: must be in {STATE_FOLDER}, the pod's volume")
        members = found.setdefault(group, [])
        if number != len(members):
            problems.append(
                f"hosts.{name}: is number {len(members)} of {group}: count from 0 without gaps"
            )
        members.append(host_plan(deployment, name))
    if is_loopback(deployment.frontends.metrics_address):
        problems.append("frontends.metrics_address: must be 0.0.0.0: probes call it")
    if deployment.frontends.hosts and is_loopback(deployment.frontends.address):
        problems.append("frontends.address: must be 0.0.0.0: the service for clients calls it")
    problems += [f"{group}: {what}" for group, plans in found.items() for what in _unlike(plans)]
    if problems:
        raise ClusterFileInvalid(deployment.path, tuple(problems))
    return found


def _unlike(plans: list[HostPlan]) -> list[str]:
    """The problem that hosts run different parts, although a StatefulSet has one pod template. []
    if they run equal parts."""

    def shape(plan: HostPlan) -> tuple[object, ...]:
        nodes = [(node.dram_bytes, node.ssd_bytes) for node in plan.storage_nodes]
        return (
            nodes,
            plan.frontend is None,
            plan.directory is None,
            plan.etcd is None,
            [(worker.pool, worker.parameters) for worker in plan.workers],
        )

    odd = [plan.host for plan in plans if shape(plan) != shape(plans[0])]
    return (
        [f"{', '.join(odd)} and {plans[0].host} run different parts: put them into two groups"]
        if odd
        else []
    )


def _group(
    deployment: Deployment, name: str, plans: list[HostPlan], gateway: PodGateway
) -> list[Document]:
    plan = plans[0]
    own = gateway if plan.frontend is not None else NO_GATEWAY
    template = pod(deployment, name, plan, ["--host", "$(POD_NAME)"], own)
    ssd_bytes = sum(node.ssd_bytes for node in plan.storage_nodes)
    spec: Document = {
        "serviceName": name,
        "replicas": len(plans),
        # Kubernetes starts all pods at once, because etcd members and directories need each other.
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector(deployment, name)},
        "template": template,
    }
    if ssd_bytes or plan.etcd is not None:
        spec["volumeClaimTemplates"] = [
            {
                "metadata": {"name": "state"},
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": str(ssd_bytes + STATE_BYTES)}},
                },
            }
        ]
        template["spec"]["volumes"] = [
            volume for volume in template["spec"]["volumes"] if volume["name"] != "state"
        ]
    headless = {
        "clusterIP": "None",
        # Directories and etcd members resolve each other's names before they are ready.
        "publishNotReadyAddresses": True,
        "selector": selector(deployment, name),
        "ports": metrics_port(deployment),
    }
    documents = [
        resource(deployment, "Service", name, headless),
        resource(deployment, "StatefulSet", name, spec, "apps/v1"),
        _budget(deployment, name),
    ]
    if plan.frontend is not None:
        documents.append(_clients(deployment, name, gateway))
    return documents


def _clients(deployment: Deployment, group: str, gateway: PodGateway) -> Document:
    """The Service for clients, which routes to a ready frontend."""
    ports = _client_ports(deployment, gateway)
    spec = {
        "selector": selector(deployment, group),
        "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()],
    }
    return resource(deployment, "Service", f"{group}-clients", spec)


def _client_ports(deployment: Deployment, gateway: PodGateway) -> dict[str, int]:
    """Name -> port for clients. Triton's ports are left out if clients must not reach them."""
    ports = {}
    if gateway.opens_triton:
        ports = {HTTP: deployment.frontends.http_port, GRPC: deployment.frontends.grpc_port}
    return ports | ({OPENAI: gateway.openai_port} if gateway.openai_port else {})


def _pool(deployment: Deployment, pool: PoolSpec) -> list[Document]:
    assert pool.elastic is not None
    plan = pool_host_plan(deployment, pool.name, "pod", "192.0.2.1")  # name, address: placeholders
    arguments = ["--pool", pool.name, "--host", "$(POD_NAME)", "--address", "$(POD_IP)"]
    spec = {
        "replicas": max(1, pool.elastic.least),
        "selector": {"matchLabels": selector(deployment, pool.name)},
        # A new worker must be ready before an old one stops.
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": pod(deployment, pool.name, plan, arguments),
    }
    workers = resource(deployment, "Deployment", pool.name, spec, "apps/v1")
    return [workers, _budget(deployment, pool.name)]


def _budget(deployment: Deployment, name: str) -> Document:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": selector(deployment, name)}}
    return resource(deployment, "PodDisruptionBudget", name, spec, "policy/v1")


def _network_policies(
    deployment: Deployment, groups: dict[str, list[HostPlan]], gateway: PodGateway
) -> list[Document]:
    """Policies by which pods of the deployment may call each other, clients may call frontends, and
    monitors may read metrics."""
    ours = labels(deployment)
    from_monitors = {
        # The operator gives this label to Prometheus' namespace. The kubelet's probes need no rule.
        "from": [{"namespaceSelector": {"matchLabels": {"mooncake/monitors": "true"}}}],
        "ports": [{"protocol": "TCP", "port": deployment.frontends.metrics_port}],
    }
    found = [
        _policy(deployment, "fleet", ours, {"from": [{"podSelector": {"matchLabels": ours}}]}),
        _policy(deployment, "metrics", ours, from_monitors),
    ]
    for name, plans in groups.items():
        if plans[0].frontend is not None:
            ports = _client_ports(deployment, gateway)
            rule = {"ports": [{"protocol": "TCP", "port": port} for port in ports.values()]}
            found.append(_policy(deployment, f"{name}-clients", selector(deployment, name), rule))
    return found


def _policy(deployment: Deployment, name: str, pods: dict[str, str], rule: Document) -> Document:
    spec = {"podSelector": {"matchLabels": pods}, "policyTypes": ["Ingress"], "ingress": [rule]}
    return resource(deployment, "NetworkPolicy", name, spec, "networking.k8s.io/v1")


def secrets(deployment: Deployment, folder: Path) -> str:
    """The manifest of the Secrets with the keys in `folder`, one for each StatefulSet or pool.

    A pod mounts only the Secret of its group, so a compromised pod has no keys of other groups. The
    pods of an elastic pool share the keys of the pool. Raises ClusterFileInvalid if a host or pool
    has no keys.
    """
    groups: dict[str, dict[str, Path]] = {}
    for host in deployment.hosts:
        match = POD_HOST.fullmatch(host)
        group = match["group"] if match else host
        groups.setdefault(group, {}).update(_files(folder / host, f"{host}."))
    pools = [pool.name for pool in deployment.elastic_pools]
    groups |= {name: dict(_files(folder / name, "")) for name in pools}
    missing = [host for host in (*deployment.hosts, *pools) if not any(_files(folder / host, ""))]
    if missing:
        what = f"there are no keys of {', '.join(missing)}: mooncake keys add-host {folder} NAME"
        raise ClusterFileInvalid(str(folder), (what,))
    return "---\n".join(
        _secret(
            deployment,
            f"keys-{group}",
            {name: path.read_bytes() for name, path in sorted(files.items())},
        )
        for group, files in groups.items()
    )


def api_keys_secret(deployment: Deployment, raw: bytes) -> str:
    """The manifest of the Secret with the API keys."""
    return _secret(deployment, API_KEYS, {API_KEYS_FILE: raw})


def _secret(deployment: Deployment, name: str, files: dict[str, bytes]) -> str:
    document: Document = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"name": name, "labels": labels(deployment)},
        "data": {file: base64.b64encode(raw).decode() for file, raw in files.items()},
    }
    return yaml.safe_dump(document, sort_keys=False, width=100)


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_file():
                yield prefix + path.name, path


def monitoring_component(deployment: Deployment) -> dict[str, str]:
    """Name -> text of each file of the Kustomize component for monitoring and autoscaling.

    The component needs Prometheus Operator (ServiceMonitor) and an adapter that serves Prometheus
    metrics as Kubernetes metrics. The size of a pool is the larger one of two. One follows the
    number of live requests of the conductor, which grows before requests wait. The other one
    follows the number of requests that wait at the pool's workers.
    """
    elastic = deployment.elastic_pools
    files = {"service-monitor.yaml": documents_text(_monitor(deployment))}
    if elastic:
        files["autoscaling.yaml"] = documents_text([_scaler(deployment, pool) for pool in elastic])
    component: Document = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "resources": list(files),
    }
    if elastic:
        # The autoscaler sets the size of a pool, so `kubectl apply` must not set it.
        component["patches"] = [
            {
                "target": {"kind": "Deployment", "name": pool.name},
                "patch": '[{"op": "remove", "path": "/spec/replicas"}]',
            }
            for pool in elastic
        ]
    return {**files, "kustomization.yaml": documents_text([component])}


def _monitor(deployment: Deployment) -> list[Document]:
    """A Service of all pods, and the ServiceMonitor by which Prometheus reads their metrics."""
    name = "metrics"
    chosen = selector(deployment, name)
    service = {
        "clusterIP": "None",
        "selector": labels(deployment),
        "ports": metrics_port(deployment),
    }
    monitor = {
        "selector": {"matchLabels": chosen},
        "targetLabels": [INSTANCE],
        "endpoints": [{"port": METRICS, "interval": "10s"}],
    }
    found = resource(deployment, "Service", name, service)
    found["metadata"]["labels"] = chosen
    api = "monitoring.coreos.com/v1"
    return [found, resource(deployment, "ServiceMonitor", name, monitor, api)]


def _scaler(deployment: Deployment, pool: PoolSpec) -> Document:
    assert pool.elastic is not None
    live = {"name": LIVE, "selector": {"matchLabels": {SERIES_LABEL: deployment.name}}}
    of_live = {"type": "AverageValue", "averageValue": str(LIVE_PER_WORKER)}
    of_waiting = {"type": "AverageValue", "averageValue": str(WAITING_PER_WORKER)}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": pool.name},
        "minReplicas": max(1, pool.elastic.least),
        "maxReplicas": pool.elastic.most,
        "metrics": [
            {"type": "External", "external": {"metric": live, "target": of_live}},
            {"type": "Pods", "pods": {"metric": {"name": WAITING}, "target": of_waiting}},
        ],
        "behavior": {
            "scaleDown": {
                "stabilizationWindowSeconds": CALM_S,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
            }
        },
    }
    return resource(deployment, "HorizontalPodAutoscaler", pool.name, spec, "autoscaling/v2")
