"""`mooncake cluster render`: writes files for hosts and other tools to rendered/ beside the file.

Not here: the contents of the files (rendered_folder.py, manifests/).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from backends.cluster.cluster_file import load
from backends.cluster.deployment import ClusterFileInvalid, Deployment
from backends.cluster.host_plan import pool_host_plan
from backends.cluster.manifests import autoscaling
from backends.cluster.manifests import compose as compose_file
from backends.cluster.manifests import firewall as firewall_rules
from backends.cluster.manifests import kubernetes as kustomize
from backends.cluster.manifests import secrets as secrets_manifest
from backends.cluster.manifests import systemd as systemd_unit
from backends.cluster.manifests.pods import PodGateway
from backends.cluster.options import (
    Base,
    ClusterFile,
    OneHost,
    plans_of,
    print_line,
    shown_mistakes,
)
from backends.cluster.rendered_folder import RenderedFolder
from backends.tenants import tenants_file

render = typer.Typer(
    name="render",
    no_args_is_help=True,
    help="Write files for hosts and other tools to rendered/ beside the cluster file.",
)


@render.command()
def models(
    cluster: ClusterFile = Path("cluster.yaml"),
    host: OneHost = "",
    model_repository: Base = Path("model_repository"),
) -> None:
    """Write the hosts' model repositories for Triton. Live edits are overwritten."""
    with shown_mistakes():
        deployment = load(cluster, model_repository)
        for plan in plans_of(deployment, host):
            folder = RenderedFolder(deployment, plan, model_repository)
            written = folder.write(keeps_edits=False)
            print_line(f"{folder.repository}: {', '.join(written) or 'nothing new'}")


@render.command()
def firewall(cluster: ClusterFile = Path("cluster.yaml"), host: OneHost = "") -> None:
    """Write nftables rules for the ports of each host. Hosts of elastic pools use
    POOL-elastic/firewall.nft."""
    with shown_mistakes():
        deployment = load(cluster)
        plans = plans_of(deployment, host)
        elastic = [] if host else [pool.name for pool in deployment.elastic_pools]
        plans += [
            pool_host_plan(deployment, name, f"{name}-elastic", "0.0.0.0") for name in elastic
        ]
        for plan in plans:
            text = firewall_rules.firewall(deployment, plan)
            path = _write(deployment, f"{plan.host}/firewall.nft", text)
            print_line(f"{path}: load it on {plan.host} with nft -f")
        if elastic:
            print_line(
                f"add the address of each elastic host on every host: nft add element "
                f"{firewall_rules.table(deployment)} {firewall_rules.ELASTIC} '{{ ADDRESS }}'"
            )


@render.command()
def systemd(
    cluster: ClusterFile = Path("cluster.yaml"),
    host: OneHost = "",
    program: Annotated[
        str, typer.Option(help="Path of `mooncake` on the hosts.")
    ] = "/opt/mooncake/.venv/bin/mooncake",
    folder: Annotated[
        str, typer.Option(help="Folder of cluster file and model_repository on the hosts.")
    ] = "/opt/mooncake",
    user: Annotated[str, typer.Option(help="User that it runs as.")] = "mooncake",
) -> None:
    """Write the hosts' systemd units."""
    with shown_mistakes():
        deployment = load(cluster)
        for plan in plans_of(deployment, host):
            text = systemd_unit.unit(deployment, plan, program, folder, user)
            name = systemd_unit.unit_name(deployment, plan.host)
            path = _write(deployment, f"{plan.host}/{name}", text)
            print_line(
                f"{path}: copy it to /etc/systemd/system of {plan.host}, systemctl enable --now"
            )


@render.command()
def compose(cluster: ClusterFile = Path("cluster.yaml")) -> None:
    """Write a Compose file that runs every host as a container on one machine."""
    with shown_mistakes():
        deployment = load(cluster)
        keys = Path(deployment.folder) / deployment.keys_folder
        owners = {
            name: (keys / name).stat().st_uid
            for name in deployment.hosts
            if deployment.keys_folder and (keys / name).is_dir()
        }
        text = compose_file.compose(deployment, owners)
        path = _write(deployment, "compose/compose.yaml", text)
        if deployment.keys_folder and (missing := deployment.hosts.keys() - owners):
            named = ", ".join(sorted(missing))
            print_line(
                f"there are no keys of {named}: make them (`mooncake keys`), then render again"
            )
        print_line(
            f"{path}: docker build -f deploy/Dockerfile -t mooncake . && docker compose -f it up"
        )


@render.command()
def kubernetes(
    cluster: ClusterFile = Path("cluster.yaml"),
    openai_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of OpenAI's interface; 0: none.")
    ] = 0,
    api_keys: Annotated[
        Path | None, typer.Option(help="File of `mooncake tenants`: a Secret that frontends mount.")
    ] = None,
) -> None:
    """Write a Kustomize base, a component for monitoring, and Secrets of the keys."""
    with shown_mistakes():
        deployment = load(cluster)
        raw, gateway = b"", PodGateway(openai_port)
        if api_keys is not None:
            raw, file = _checked_api_keys(api_keys)
            gateway = PodGateway(openai_port, True, file.keyless != "refused")
        files = kustomize.kustomize_base(deployment, cluster.read_text(), gateway)
        for name, text in files.items():
            path = _write(deployment, f"kubernetes/base/{name}", text)
        print_line(f"{path.parent}: {', '.join(files)}")
        for name, text in autoscaling.monitoring_component(deployment).items():
            path = _write(deployment, f"kubernetes/monitoring/{name}", text)
        print_line(f"{path.parent}: needs Prometheus Operator and an adapter for its metrics")
        if raw:
            text = secrets_manifest.api_keys_secret(deployment, raw)
            path = _write(deployment, "kubernetes/api-keys.yaml", text, mode=0o600)
            print_line(f"{path}: kubectl apply -f it, now and after each edit of {api_keys}")
        keys = Path(deployment.folder) / deployment.keys_folder
        if deployment.keys_folder and keys.is_dir():
            text = secrets_manifest.secrets(deployment, keys)
            path = _write(deployment, "kubernetes/secrets.yaml", text, mode=0o600)
            print_line(f"{path}: kubectl apply -f it, and keep it as the keys")
        elif deployment.keys_folder:
            print_line(f"no Secrets: there is no {keys}; `mooncake keys init` makes it")


def _checked_api_keys(path: Path) -> tuple[bytes, tenants_file.TenantsFile]:
    try:
        raw = tenants_file.content(path)
        return raw, tenants_file.parse(raw, str(path))
    except tenants_file.TenantsInvalid as error:
        raise ClusterFileInvalid(str(path), (str(error),)) from None


def _write(deployment: Deployment, name: str, text: str, mode: int = 0o644) -> Path:
    """Write a file below rendered/ atomically."""
    path = Path(deployment.folder) / "rendered" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)
    return path
