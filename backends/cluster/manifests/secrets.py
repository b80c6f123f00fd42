"""Kubernetes Secrets with the keys from `mooncake keys`, one for each group of pods.

A pod mounts only the Secret of its group, so a compromised storage node has no key of a directory.
The pods of an elastic pool share the keys of a host with the pool's name.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import yaml

from backends.cluster.deployment import ClusterFileInvalid, Deployment
from backends.cluster.manifests.kubernetes import POD_HOST
from backends.cluster.manifests.pods import API_KEYS, API_KEYS_FILE, Document, labels


def secrets(deployment: Deployment, folder: Path) -> str:
    """The manifest of all Secrets. Raises ClusterFileInvalid if a host has no keys in `folder`."""
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
    """The manifest of the API keys, apart because it is applied after each edit of the file."""
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
