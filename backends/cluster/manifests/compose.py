"""A Compose file with one service for each host of a deployment, all on one machine.

Each host is a container with its own network stack and its own /dev/shm, so hosts share no memory.
All containers join one network. In this network, a host with an IP address has this address, and a
host with a DNS name has the name as an alias.

The files of keys, checkpoint and engine options are mounted at the paths in the cluster file. Only
the owner of keys can read them, so a container runs as the owner of its host's keys.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import yaml

from backends.cluster.deployment import (
    HOST_PORT_STEP,
    ClusterFileInvalid,
    Deployment,
    is_ip,
    is_loopback,
)
from backends.cluster.host_plan import HostPlan, host_and_port, host_plan
from backends.cluster.manifests.pods import FOLDER, IMAGE, SHM_EXTRA_BYTES, USER
from backends.cluster.model_rendering import OPTION_FILES

STOP_S = 30  # seconds after which Docker kills a container that does not stop
PREFIX_BITS_MIN = 8  # the largest private network is 10.0.0.0/8
BACK = "../.."  # from compose.yaml to the folder of the cluster file


def compose(deployment: Deployment, owners: Mapping[str, int] | None = None) -> str:
    """The text of compose.yaml, for a folder two levels below that of the cluster file. `owners`
    maps a host to the user id that owns its keys. Raises ClusterFileInvalid for paths or addresses
    that containers cannot use."""
    file = deployment.file_name
    services = {
        name: _service(deployment, host_plan(deployment, name), number, (owners or {}).get(name))
        for number, name in enumerate(deployment.hosts)
    }
    document = {
        "name": f"mooncake-{deployment.name}",
        "services": services,
        "networks": {"fleet": _network(deployment)},
        "volumes": {f"state-{name}": {} for name in deployment.hosts},
    }
    head = f"# Rendered from {file} by `mooncake cluster render compose`.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=100)


def _mount(path: str) -> str:
    """The volume that mounts a path of the cluster file into a container, read-only."""
    outside, inside = (posixpath.normpath(posixpath.join(base, path)) for base in (BACK, FOLDER))
    return f"{outside}:{inside}:ro"


def _read(deployment: Deployment) -> list[str]:
    """Paths of the files that workers and frontends read, as in the cluster file."""
    raw = [pool.parameters for pool in deployment.pools]
    raw += [worker.parameters for worker in deployment.workers]
    given = [each.get(name, "") for each in raw for name in OPTION_FILES]
    options = [text for text in given if text[:1] not in ("", "{")]
    found = [deployment.checkpoint] * (deployment.checkpoint != "demo") + options
    if at_home := [path for path in found if path.startswith("~")]:
        what = f"{at_home[0]}: containers have other home folders: use a path that begins with /"
        raise ClusterFileInvalid(deployment.path, (what,))
    return list(dict.fromkeys(found))


def _service(
    deployment: Deployment, plan: HostPlan, number: int, owner: int | None
) -> dict[str, Any]:
    file = deployment.file_name
    # The volume state-HOST has logs, etcd's data, SSD tiers, and rendered models with live edits.
    volumes = [f"state-{plan.host}:{FOLDER}", *map(_mount, (file, *_read(deployment)))]
    if deployment.keys_folder:
        volumes.append(_mount(f"{deployment.keys_folder}/{plan.host}"))
    address = plan.address
    place = {"ipv4_address": address} if is_ip(address) else {"aliases": [address]}
    service: dict[str, Any] = {
        "image": IMAGE,
        "command": ["mooncake", "serve", "--cluster", f"{FOLDER}/{file}", "--host", plan.host],
        "user": f"${{MOONCAKE_USER:-{USER if owner is None else owner}}}",
        "environment": {"HOME": FOLDER, "USER": "mooncake"},  # the image may lack the user
        "hostname": plan.host,
        "networks": {"fleet": place},
        "volumes": volumes,
        "shm_size": plan.shm_bytes + SHM_EXTRA_BYTES,
        "ulimits": {"memlock": -1, "nofile": 65_536},
        "stop_grace_period": f"{STOP_S}s",
        "restart": "on-failure",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _ask(plan)],
            "interval": "10s",
            "timeout": "5s",
            "start_period": "120s",
        },
    }
    if plan.frontend is not None and not is_loopback(deployment.frontends.address):
        # Published ports are those of the file, plus HOST_PORT_STEP for each host before this one.
        ports = (deployment.frontends.http_port, deployment.frontends.grpc_port)
        service["ports"] = [f"127.0.0.1:{port + HOST_PORT_STEP * number}:{port}" for port in ports]
    return service


def _ask(plan: HostPlan) -> str:
    port = host_and_port(plan.metrics)[1]
    # Docker passes its proxy settings to containers, and urlopen would use them for loopback.
    opener = "u.build_opener(u.ProxyHandler({}))"
    return f"import urllib.request as u; {opener}.open('http://127.0.0.1:{port}/ready', timeout=4)"


def _network(deployment: Deployment) -> dict[str, Any]:
    """The smallest network of /24 or larger with all IP addresses, and a free address of it as the
    gateway. {} if all hosts have DNS names."""
    addresses = [
        IPv4Address(each.address) for each in deployment.hosts.values() if is_ip(each.address)
    ]
    if not addresses:
        return {}
    if any(each.is_loopback for each in addresses):
        what = "hosts: containers need IP addresses that are not loopback, or DNS names"
        raise ClusterFileInvalid(deployment.path, (what,))
    if len(set(addresses)) < len(addresses):
        what = "hosts: each container needs an address of its own"
        raise ClusterFileInvalid(deployment.path, (what,))
    network = IPv4Network(f"{addresses[0]}/24", strict=False)
    while not all(each in network for each in addresses):
        network = network.supernet()
    if network.prefixlen < PREFIX_BITS_MIN:
        what = (
            f"hosts: {network}, the smallest network with all addresses, is larger than "
            f"/{PREFIX_BITS_MIN}: use addresses of one private network"
        )
        raise ClusterFileInvalid(deployment.path, (what,))
    gateway = network.broadcast_address - 1
    while gateway in addresses:
        gateway -= 1
    return {"ipam": {"config": [{"subnet": str(network), "gateway": str(gateway)}]}}
