"""The commands of `mooncake cluster`. Each command reads the cluster file and checks it first."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backends import launch_secret
from backends.cluster.cluster_file import load
from backends.cluster.deployment import ClusterFileInvalid, Deployment
from backends.cluster.drain import HostDrain
from backends.cluster.host_plan import HostPlan, directory_address, host_plan, pool_host_plan
from backends.cluster.manifests import compose, firewall, kubernetes, systemd
from backends.cluster.manifests.pods import PodGateway
from backends.cluster.model_rendering import TemplateMissing
from backends.cluster.rendered_folder import RenderedFolder
from backends.cluster.status import DOWN, FleetStatus, fleet_status
from backends.config_pbtxt import checkpoint_folder
from backends.errors import ConfigError
from backends.tenants import tenants_file
from mooncake_store.cli.arguments import shown_bytes
from mooncake_store.errors import StoreError
from mooncake_store.keys import folder as keys_folder
from mooncake_store.keys.curve import INSECURE_VARIABLE
from mooncake_store.process.edited_file import replace_file

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Check, render, show or drain a deployment of several hosts, as one file describes it.",
)
render = typer.Typer(
    name="render",
    no_args_is_help=True,
    help="Write files for hosts and other tools to rendered/ beside the cluster file.",
)
app.add_typer(render)

ClusterFile = Annotated[Path, typer.Option("--cluster", help="The cluster file.")]
OneHost = Annotated[str, typer.Option("--host", help="This host only (default: all).")]
KeysOf = Annotated[
    str, typer.Option(help="Use the keys of this host (default: the keys on this machine).")
]
Base = Annotated[
    Path, typer.Option("--model-repository", help="The model repository to render from.")
]

FAILURES = (ClusterFileInvalid, TemplateMissing, tenants_file.TenantsInvalid, StoreError, OSError)


@contextlib.contextmanager
def shown_mistakes() -> Iterator[None]:
    """Print an exception of FAILURES to stderr, without a traceback, and exit with status 1."""
    try:
        yield
    except FAILURES as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        sys.exit(1)


def print_line(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def plans_of(deployment: Deployment, host: str) -> list[HostPlan]:
    """The plan of `host`, or all plans for "". Raises BadParameter for an unknown host."""
    if host and host not in deployment.hosts:
        known = ", ".join(deployment.hosts)
        raise typer.BadParameter(f"there is no host {host!r} in {deployment.path}; known: {known}")
    return [host_plan(deployment, name) for name in ([host] if host else deployment.hosts)]


@app.command()
def check(
    cluster: ClusterFile = Path("cluster.yaml"),
    host: OneHost = "",
    model_repository: Base = Path("model_repository"),
) -> None:
    """Print all mistakes of the file, or each host's processes and models that differ on disk."""
    with shown_mistakes():
        deployment = load(cluster, model_repository)
        plans = plans_of(deployment, host)
        console.print(_hosts_table(deployment, plans))
        for note in _notes(deployment):
            print_line(f"note: {note}")
        for plan in plans:
            for difference in RenderedFolder(deployment, plan, model_repository).differences():
                if host or difference.kind != "missing":  # each host has only its own models
                    print_line(f"{plan.host}: {difference}")
    print_line(f"{cluster} is right")


@app.command()
def status(
    cluster: ClusterFile = Path("cluster.yaml"),
    keys_of: KeysOf = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """Show etcd, directory, storage nodes, frontends and workers of all hosts.

    The exit status is 1 if a part in the file is down or the directory does not answer, else 0.
    Frontends that listen on loopback are not checked.
    """
    with shown_mistakes():
        deployment = load(cluster)
        found = fleet_status(deployment, join_as_operator(deployment, keys_of))
        if as_json:
            console.file.write(json.dumps(asdict(found)) + "\n")
        else:
            console.print(_status_table(deployment, found))
            for stranger in found.strangers:
                print_line(f"not in the file: {stranger}")
            for line in (each for host in found.hosts for each in host.down):
                print_line(line)
            if found.problem:
                print_line(f"the directory does not answer: {found.problem}")
    if not found.is_well:
        sys.exit(1)


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="A host of the file or an elastic host.")],
    cluster: ClusterFile = Path("cluster.yaml"),
    undo: Annotated[bool, typer.Option("--undo", help="Accept requests and blocks again.")] = (
        False
    ),
    requests_s: Annotated[
        float, typer.Option(help="Seconds after which requests are moved to other hosts.")
    ] = 30.0,
    deadline_s: Annotated[float, typer.Option(help="Seconds after which draining stops.")] = 600.0,
    keys_of: KeysOf = "",
) -> None:
    """Drain a host before a stop: requests finish or move, and blocks only on it are copied."""
    with shown_mistakes():
        deployment = load(cluster)
        if host not in deployment.hosts and not deployment.elastic_pools:
            plans_of(deployment, host)  # raises BadParameter, which names the known hosts
        with contextlib.closing(
            HostDrain(deployment, host, join_as_operator(deployment, keys_of))
        ) as draining:
            if not draining.is_known:
                errors.print(
                    f"no node or worker of host {host!r} is in the directory", markup=False
                )
                sys.exit(1)
            if undo:
                draining.undo()
                print_line(f"{host} accepts requests and blocks again")
                return
            left = draining.run(requests_s, deadline_s, print_line)
        if host in deployment.frontends.hosts:
            print_line(
                f"{host} has a frontend: send clients elsewhere, because its streams end with it"
            )
        if left.is_empty:
            print_line(f"{host} is drained: no request and no block is lost if it stops")
            return
        errors.print(
            f"{left.requests} requests and {left.blocks} blocks are left on {host}: other hosts "
            "have no room for them, or --deadline-s passed. Drain again, or stop it and lose them."
        )
    sys.exit(1)


@render.command("models")
def render_models(
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


@render.command("firewall")
def render_firewall(cluster: ClusterFile = Path("cluster.yaml"), host: OneHost = "") -> None:
    """Write nftables rules of each host. POOL-elastic/firewall.nft is for elastic hosts of POOL."""
    with shown_mistakes():
        deployment = load(cluster)
        plans = plans_of(deployment, host)
        elastic = [] if host else [pool.name for pool in deployment.elastic_pools]
        plans += [
            pool_host_plan(deployment, name, f"{name}-elastic", "0.0.0.0") for name in elastic
        ]
        for plan in plans:
            text = firewall.firewall(deployment, plan)
            path = _write(deployment, f"{plan.host}/firewall.nft", text)
            print_line(f"{path}: load it on {plan.host} with nft -f")
        if elastic:
            print_line(
                f"add the address of each elastic host on every host: nft add element "
                f"{firewall.table(deployment)} {firewall.ELASTIC} '{{ ADDRESS }}'"
            )


@render.command("systemd")
def render_systemd(
    cluster: ClusterFile = Path("cluster.yaml"),
    host: OneHost = "",
    program: Annotated[
        str, typer.Option(help="Path of `mooncake` on the hosts.")
    ] = "/opt/mooncake/.venv/bin/mooncake",
    folder: Annotated[
        str, typer.Option(help="Folder of cluster file and model_repository on the hosts.")
    ] = "/opt/mooncake",
    user: Annotated[str, typer.Option(help="User of the service.")] = "mooncake",
) -> None:
    """Write the hosts' systemd units."""
    with shown_mistakes():
        deployment = load(cluster)
        for plan in plans_of(deployment, host):
            text = systemd.unit(deployment, plan, program, folder, user)
            name = systemd.unit_name(deployment, plan.host)
            path = _write(deployment, f"{plan.host}/{name}", text)
            print_line(
                f"{path}: copy it to {plan.host}:/etc/systemd/system; systemctl enable --now {name}"
            )


@render.command("compose")
def render_compose(cluster: ClusterFile = Path("cluster.yaml")) -> None:
    """Write a Compose file that runs every host as a container on one machine."""
    with shown_mistakes():
        deployment = load(cluster)
        keys = Path(deployment.folder) / deployment.keys_folder
        owners = {
            name: (keys / name).stat().st_uid
            for name in deployment.hosts
            if deployment.keys_folder and (keys / name).is_dir()
        }
        text = compose.compose(deployment, owners)
        path = _write(deployment, "compose/compose.yaml", text)
        if deployment.keys_folder and (missing := deployment.hosts.keys() - owners):
            named = ", ".join(sorted(missing))
            print_line(
                f"there are no keys of {named}: make them (`mooncake keys`), then render again"
            )
        print_line(
            f"docker build -f deploy/Dockerfile -t mooncake . && docker compose -f {path} up"
        )


@render.command("kubernetes")
def render_kubernetes(
    cluster: ClusterFile = Path("cluster.yaml"),
    openai_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of OpenAI's interface; 0: none.")
    ] = 0,
    api_keys: Annotated[
        Path | None, typer.Option(help="File of `mooncake tenants`, for a Secret of the frontends.")
    ] = None,
) -> None:
    """Write a Kustomize base, a component for monitoring, and Secrets of the keys."""
    with shown_mistakes():
        deployment = load(cluster)
        raw, gateway = b"", PodGateway(openai_port)
        if api_keys is not None:
            raw = tenants_file.content(api_keys)
            keyless = tenants_file.parse(raw, str(api_keys)).keyless
            gateway = PodGateway(openai_port, True, keyless != "refused")
        files = kubernetes.kustomize_base(deployment, cluster.read_text(), gateway)
        for name, text in files.items():
            path = _write(deployment, f"kubernetes/base/{name}", text)
        print_line(f"{path.parent}: {', '.join(files)}")
        for name, text in kubernetes.monitoring_component(deployment).items():
            path = _write(deployment, f"kubernetes/monitoring/{name}", text)
        print_line(f"{path.parent}: needs Prometheus Operator and an adapter for its metrics")
        if raw:
            text = kubernetes.api_keys_secret(deployment, raw)
            path = _write(deployment, "kubernetes/api-keys.yaml", text, mode=0o600)
            print_line(f"{path}: kubectl apply -f it, now and after each edit of {api_keys}")
        keys = Path(deployment.folder) / deployment.keys_folder
        if deployment.keys_folder and keys.is_dir():
            text = kubernetes.secrets(deployment, keys)
            path = _write(deployment, "kubernetes/secrets.yaml", text, mode=0o600)
            print_line(f"{path}: kubectl apply -f it, and keep it as secret as the keys")
        elif deployment.keys_folder:
            print_line(f"no Secrets: there is no {keys}; `mooncake keys init` makes it")


def _write(deployment: Deployment, name: str, text: str, mode: int = 0o644) -> Path:
    path = Path(deployment.folder) / "rendered" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode(), lambda descriptor: os.fchmod(descriptor, mode))
    return path


def join_as_operator(deployment: Deployment, host: str = "") -> str:
    """Set the environment variables with which this process connects as `host`, or with the first
    keys on this machine without `host`. Return the address of the directory. Raises
    ClusterFileInvalid if the deployment has keys, and this user can read none of them here."""
    if deployment.is_insecure:
        os.environ[INSECURE_VARIABLE] = "1"
    if deployment.keys_folder:
        folder = _keys_on_this_machine(deployment, host)
        os.environ[keys_folder.VARIABLE] = str(folder)
        secret = (folder / keys_folder.SECRET).read_text().strip()
    else:
        secret = launch_secret.insecure_secret(deployment.name)
    os.environ[launch_secret.SECRET_VARIABLE] = secret
    return directory_address(deployment)


def _keys_on_this_machine(deployment: Deployment, host: str) -> Path:
    base = Path(deployment.folder) / deployment.keys_folder
    names = [host] if host else list(deployment.hosts)
    for folder in (*(base / name for name in names), base):
        if not keys_folder.problems(folder):
            return folder
    what = (
        f"keys.folder: {base} has no keys that this user may read: run this on a host of the "
        "deployment as a user who may, or copy a host's folder of keys there"
    )
    raise ClusterFileInvalid(deployment.path, (what,))


def _status_table(deployment: Deployment, found: FleetStatus) -> Table:
    table = Table(title=f"deployment {deployment.name}", title_justify="left")
    for column in ("host", "address", "part", "state"):
        table.add_column(column, overflow="fold")
    for host in found.hosts:
        for number, (part, state) in enumerate(host.parts.items()):
            first = (host.name, host.address) if number == 0 else ("", "")
            style = "bold red" if DOWN in state else ""
            table.add_row(
                *first, part, Text(state, style), end_section=number + 1 == len(host.parts)
            )
    return table


def _hosts_table(deployment: Deployment, plans: list[HostPlan]) -> Table:
    table = Table(title=f"deployment {deployment.name}", title_justify="left")
    for column in ("host", "address", "runs"):
        table.add_column(column, overflow="fold")
    for plan in plans:
        runs = ["etcd"] * (plan.etcd is not None) + ["directory"] * (plan.directory is not None)
        runs += [f"node {n.name} ({shown_bytes(n.dram_bytes)})" for n in plan.storage_nodes]
        runs += ["frontend"] * (plan.frontend is not None)
        runs += [worker.model for worker in plan.workers]
        table.add_row(plan.host, plan.address, ", ".join(runs) or "nothing")
    return table


def _notes(deployment: Deployment) -> Iterator[str]:
    """Texts about valid settings that the operator may not intend."""
    etcd = deployment.etcd
    if etcd is not None and etcd.hosts and len(etcd.hosts) % 2 == 0:
        yield f"{len(etcd.hosts)} etcd members tolerate no more failures than {len(etcd.hosts) - 1}"
    if deployment.is_insecure:
        yield "insecure: every machine that reaches the ports can use them, and read and change KV"
    for name in deployment.hosts:
        if host_plan(deployment, name).is_idle:
            yield f"host {name} runs nothing"
    try:
        checkpoint_folder(deployment.checkpoint, f"{deployment.folder}/model_repository")
    except ConfigError as error:
        yield f"on this machine {error}"
