"""The pod template: one host of a deployment in a container.

The folder of the cluster file is writable inside the pod, because models are rendered there. The
file comes from a ConfigMap, and the state folder is a volume. A group can read a mounted Secret,
and a group must not read keys. An init container therefore copies the host's keys from the Secret.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any

import yaml

from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import HostPlan, gpus_of

IMAGE = "mooncake"  # a Kustomize overlay replaces this name by the real image (`images:`)
FOLDER = "/var/lib/mooncake"  # folder of the cluster file in every container
STATE_FOLDER = ".mooncake"  # folder in FOLDER where the volume with a host's state is mounted
HTTP, GRPC, METRICS, OPENAI = "http", "grpc", "metrics", "openai"  # names of ports
GPU = "nvidia.com/gpu"  # resource name of NVIDIA's device plugin
USER = 1_000  # user id of the image
BASE_MEMORY_BYTES = 2 << 30  # memory without /dev/shm; a host that serves the demo uses 1 GiB
SHM_EXTRA_BYTES = 1 << 30  # room for Tritons in /dev/shm, in addition to the memory segments
STOP_S = 60  # limit in seconds for the stop of a pod, after the drain
DRAIN_S_MAX = 240  # limit in seconds for the drain of a pod with a storage node

# The Secret of the API keys is mounted as a folder, so that an edit reaches a running pod after a
# minute or two. A file that is mounted alone (subPath) never changes in a running pod.
API_KEYS, API_KEYS_FOLDER, API_KEYS_FILE = "api-keys", "/etc/mooncake", "api-keys.json"

Document = dict[str, Any]


@dataclass(frozen=True)
class PodGateway:
    """The gateway (OpenAI's interface) of pods with a frontend."""

    openai_port: int = 0  # 0 without a gateway
    has_api_keys: bool = False
    serves_keyless: bool = True  # True if Triton's own ports serve requests without an API key

    @property
    def opens_triton(self) -> bool:
        """True if clients may call Triton's own ports. False if this would bypass the API keys."""
        return not (self.has_api_keys and self.serves_keyless)

    @property
    def arguments(self) -> list[str]:
        found = []
        if self.openai_port:
            found += ["--openai-port", str(self.openai_port)]
        if self.has_api_keys:
            found += ["--api-keys", f"{API_KEYS_FOLDER}/{API_KEYS_FILE}"]
        return found


NO_GATEWAY = PodGateway()


def documents_text(documents: list[Document]) -> str:
    head = (
        "# Rendered by `mooncake cluster render kubernetes`; change cluster.yaml or an overlay.\n"
    )
    return head + yaml.safe_dump_all(documents, sort_keys=False, width=100)


def labels(deployment: Deployment) -> dict[str, str]:
    """The labels of every pod of the deployment."""
    return {"app.kubernetes.io/name": "mooncake", "app.kubernetes.io/instance": deployment.name}


def selector(deployment: Deployment, component: str) -> dict[str, str]:
    """The labels of the pods of one StatefulSet or Deployment."""
    return labels(deployment) | {"app.kubernetes.io/component": component}


def resource(
    deployment: Deployment, kind: str, name: str, spec: Document, api: str = "v1"
) -> Document:
    metadata = {"name": name, "labels": labels(deployment)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def metrics_port(deployment: Deployment) -> list[Document]:
    """The only port of a headless Service, which is the metrics port."""
    port = deployment.frontends.metrics_port
    return [{"name": METRICS, "port": port, "targetPort": METRICS}]


def pod(
    deployment: Deployment,
    name: str,
    plan: HostPlan,
    arguments: list[str],
    gateway: PodGateway = NO_GATEWAY,
) -> Document:
    """The template of a pod. `arguments` select the host or pool for `mooncake serve`."""
    chosen = selector(deployment, name)
    shm_bytes = plan.shm_bytes + SHM_EXTRA_BYTES
    volumes: list[Document] = [
        {"name": "cluster-file", "configMap": {"name": "cluster-file"}},
        {"name": "folder", "emptyDir": {}},
        {"name": "state", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(shm_bytes)}},
    ]
    spec: Document = {
        "terminationGracePeriodSeconds": STOP_S + (DRAIN_S_MAX if plan.storage_nodes else 0),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": chosen},
            }
        ],
        "containers": [_container(deployment, plan, [*arguments, *gateway.arguments], gateway)],
        "volumes": volumes,
    }
    if deployment.keys_folder:
        volumes += [
            {"name": "secret", "secret": {"secretName": f"keys-{name}", "defaultMode": 0o440}},
            {"name": "keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ]
        spec["initContainers"] = [_keys_copier()]
    if gateway.has_api_keys:
        secret = {"secretName": API_KEYS, "defaultMode": 0o440}  # readable by the pod's fsGroup
        volumes.append({"name": API_KEYS, "secret": secret})
    return {"metadata": {"labels": chosen}, "spec": spec}


def _container(
    deployment: Deployment, plan: HostPlan, arguments: list[str], gateway: PodGateway
) -> Document:
    file = deployment.file_name
    mounts: list[Document] = [
        {"name": "folder", "mountPath": FOLDER},
        {"name": "cluster-file", "mountPath": f"{FOLDER}/{file}", "subPath": "cluster.yaml"},
        {"name": "state", "mountPath": f"{FOLDER}/{STATE_FOLDER}"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if deployment.keys_folder:
        mounts.append(
            {
                "name": "keys",
                "mountPath": posixpath.join(FOLDER, deployment.keys_folder),
                "readOnly": True,
            }
        )
    if gateway.has_api_keys:
        mounts.append({"name": API_KEYS, "mountPath": API_KEYS_FOLDER, "readOnly": True})
    container = {
        "name": "mooncake",
        "image": IMAGE,
        "args": ["mooncake", "serve", "--cluster", f"{FOLDER}/{file}", *arguments],
        "env": _environment(),
        "ports": _ports(deployment, plan, gateway),
        # /ready returns 200 while every model of the host serves. The launcher restarts its own
        # child processes. Kubernetes restarts a container only if it is not ready 10 minutes after
        # its start, or if the launcher does not answer /live for a minute.
        "startupProbe": _probe("/ready", period_s=5, failures=120),
        "readinessProbe": _probe("/ready", period_s=5, failures=2),
        "livenessProbe": _probe("/live", period_s=10, failures=6),
        "resources": _resources(plan),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    if plan.storage_nodes:
        # The drain copies blocks to other hosts before Kubernetes stops this pod.
        drain = f'exec mooncake cluster drain "$POD_NAME" --cluster {FOLDER}/{file} --deadline-s '
        command = ["sh", "-c", drain + str(DRAIN_S_MAX - 10)]
        container["lifecycle"] = {"preStop": {"exec": {"command": command}}}
    return container


def _resources(plan: HostPlan) -> Document:
    """The resources of a pod. The memory includes /dev/shm. A Kustomize overlay must add segments
    outside of /dev/shm (`segment_path`) and the staging memory of engines on GPUs."""
    threads = sum(int(worker.parameters.get("threads", 1)) for worker in plan.workers)
    limits = {"memory": str(BASE_MEMORY_BYTES + plan.shm_bytes + SHM_EXTRA_BYTES)}
    used = gpus_of({worker.model: worker.parameters for worker in plan.workers}).values()
    if gpus := {gpu.strip() for each in used for gpu in each.split(",")}:
        limits[GPU] = str(len(gpus))
    return {"requests": {"cpu": str(threads + 1), **limits}, "limits": limits.copy()}


def _environment() -> list[Document]:
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]


def _ports(deployment: Deployment, plan: HostPlan, gateway: PodGateway) -> list[Document]:
    found = {METRICS: deployment.frontends.metrics_port}
    if plan.frontend is not None:
        found[HTTP], found[GRPC] = deployment.frontends.http_port, deployment.frontends.grpc_port
        if gateway.openai_port:
            found[OPENAI] = gateway.openai_port
    return [{"name": name, "containerPort": port} for name, port in found.items()]


def _probe(path: str, period_s: int, failures: int) -> Document:
    return {
        "httpGet": {"path": path, "port": METRICS},
        "periodSeconds": period_s,
        "timeoutSeconds": 4,
        "failureThreshold": failures,
    }


def _keys_copier() -> Document:
    """The init container that copies a pod's keys from the Secret. A pod of a StatefulSet copies
    the files whose names begin with its own name. A pod of a pool copies all files."""
    script = (
        'cd /secret; for file in *; do case "$file" in "$POD_NAME".*) '
        'install -m 600 "$file" "/keys/${file#"$POD_NAME".}";; '
        '*-[0-9]*.*) ;; *) install -m 600 "$file" "/keys/$file";; esac; done'
    )
    return {
        "name": "keys",
        "image": IMAGE,
        "command": ["sh", "-ec", script],
        "env": _environment(),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "secret", "mountPath": "/secret", "readOnly": True},
            {"name": "keys", "mountPath": "/keys"},
        ],
    }
