"""The template of a pod: one host of a deployment in a container.

The folder of the cluster file is made inside of the pod, because models are rendered there: the
file itself comes from a ConfigMap, the host's keys are copied out of a Secret (a mounted one is
readable by a group, which keys must not be), and state is a volume.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any

import yaml

from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import HostPlan, gpus_of

IMAGE = "mooncake"  # an overlay names the real one (`images:`)
FOLDER = "/var/lib/mooncake"  # of the cluster file, in every container
STATE_FOLDER = ".mooncake"  # in it: what hosts keep, a volume
HTTP, GRPC, METRICS, OPENAI = "http", "grpc", "metrics", "openai"  # names of ports
GPU = "nvidia.com/gpu"  # the resource of NVIDIA's device plugin
USER = 1_000  # of the image
BASE_MEMORY_BYTES = 2 << 30  # a host that serves the demo needs 1 GiB; engines need their KV
SHM_EXTRA_BYTES = 1 << 30  # what Tritons need in /dev/shm beside the segments
STOP_S = 60
DRAIN_S_MAX = 240  # before a storage node is asked to stop

# The Secret of the API keys is a folder there, so that an edit of it reaches the pod in a
# minute or two: a file that is mounted alone (subPath) never changes.
API_KEYS, API_KEYS_FOLDER, API_KEYS_FILE = "api-keys", "/etc/mooncake", "api-keys.json"

Document = dict[str, Any]


@dataclass(frozen=True)
class PodGateway:
    """What pods with a frontend serve beside Triton's own ports."""

    openai_port: int = 0  # 0: no gateway
    has_api_keys: bool = False
    serves_keyless: bool = True  # `keyless` of the API keys: requests that come past the gateway

    @property
    def opens_triton(self) -> bool:
        """Clients may reach Triton's ports, which know no keys."""
        return not (self.has_api_keys and self.serves_keyless)

    @property
    def arguments(self) -> list[str]:
        found = []
        if self.openai_port:
            found += ["--openai-port", str(self.openai_port)]
        if self.has_api_keys:
            found += ["--api-keys", f"{API_KEYS_FOLDER}/{API_KEYS_FILE}"]
        return found


def documents_text(documents: list[Document]) -> str:
    """One file of a base or component."""
    head = (
        "# Rendered by `mooncake cluster render kubernetes`; change cluster.yaml or an overlay.\n"
    )
    return head + yaml.safe_dump_all(documents, sort_keys=False, width=100)


def labels(deployment: Deployment) -> dict[str, str]:
    """Of every pod of the deployment."""
    return {"app.kubernetes.io/name": "mooncake", "app.kubernetes.io/instance": deployment.name}


def selector(deployment: Deployment, component: str) -> dict[str, str]:
    """Of the pods of one StatefulSet or Deployment."""
    return labels(deployment) | {"app.kubernetes.io/component": component}


def metadata(deployment: Deployment, name: str) -> Document:
    return {"name": name, "labels": labels(deployment)}


def pod(
    deployment: Deployment,
    name: str,
    plan: HostPlan,
    arguments: list[str],
    gateway: PodGateway | None = None,
) -> Document:
    """`arguments` say which host `mooncake serve` is; `gateway`: of one with a frontend."""
    gateway = gateway or PodGateway()
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
            },
        ],
        "containers": [_container(deployment, plan, [*arguments, *gateway.arguments], gateway)],
        "volumes": volumes,
    }
    if deployment.keys_folder:
        volumes += [
            {"name": "secret", "secret": {"secretName": f"keys-{name}", "defaultMode": 0o440}},
            {"name": "keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ]
        spec["initContainers"] = [_keys_copier(plan)]
    if gateway.has_api_keys:
        secret = {"secretName": API_KEYS, "defaultMode": 0o440}  # the user of the pod is no root
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
        # /ready says 200 once every model of the host serves; a launcher starts again what dies
        # below it, so only one that answers nothing at all is started again, as /live says.
        "startupProbe": _probe("/ready", period_s=5, failures=120),
        "readinessProbe": _probe("/ready", period_s=5, failures=2),
        "livenessProbe": _probe("/live", period_s=10, failures=6),
        "resources": _resources(plan),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    if plan.storage_nodes:
        # A rolling update loses no block: its only copies are elsewhere before the pod stops.
        drain = f'exec mooncake cluster drain "$POD_NAME" --cluster {FOLDER}/{file} --deadline-s '
        command = ["sh", "-c", drain + str(DRAIN_S_MAX - 10)]
        container["lifecycle"] = {"preStop": {"exec": {"command": command}}}
    return container


def _resources(plan: HostPlan) -> Document:
    """What lies in /dev/shm counts as the pod's memory. The volume of a `segment_path` elsewhere is
    an overlay's, and so is what it takes; so is what engines on GPUs stage in /dev/shm."""
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


def _keys_copier(plan: HostPlan) -> Document:
    """Files of a pod in the Secret begin with its own name, or with none (a pool's pods share)."""
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
