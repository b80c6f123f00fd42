"""The commands of `mooncake cluster`. Each reads the cluster file anew; errors end in its lines.

Not here: what they look at and write (the other modules of this room), serving
(backends/launcher/command.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from backends.cluster.cluster_file import load
from backends.cluster.deployment import ClusterFileInvalid, Deployment
from backends.cluster.host_plan import HostPlan, host_plan
from backends.cluster.model_rendering import TemplateMissing
from backends.cluster.rendered_folder import RenderedFolder
from backends.config_pbtxt import checkpoint_folder
from backends.errors import ConfigError
from mooncake_store.cli.arguments import shown_bytes

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A deployment of several hosts, as one file describes it: check it, render it.",
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

ClusterFile = Annotated[Path, typer.Option("--cluster", help="The cluster file.")]
OneHost = Annotated[str, typer.Option("--host", help="This host only (default: all).")]
Base = Annotated[
    Path, typer.Option("--model-repository", help="The models that hosts' ones are rendered from.")
]


@contextlib.contextmanager
def shown_mistakes() -> Iterator[None]:
    """A file with mistakes becomes lines on stderr and exit status 1."""
    try:
        yield
    except (ClusterFileInvalid, TemplateMissing, OSError) as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        sys.exit(1)


def plans_of(deployment: Deployment, host: str) -> list[HostPlan]:
    """Of this host, or of all; BadParameter when there is no such host."""
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
    """Name every mistake of the file, what each host runs, and where live edits differ from it."""
    with shown_mistakes():
        deployment = load(cluster)
        plans = plans_of(deployment, host)
        console.print(_hosts_table(deployment, plans))
        for note in _notes(deployment):
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        for plan in plans:
            for difference in RenderedFolder(deployment, plan, model_repository).differences():
                if host or difference.kind != "missing":  # other hosts have theirs on their disks
                    console.print(f"{plan.host}: {difference}", markup=False, soft_wrap=True)
    console.print(f"{cluster} is right", markup=False, soft_wrap=True)


render = typer.Typer(
    name="render", no_args_is_help=True,
    help="Write what hosts and other engines read, below rendered/ beside the cluster file.",
)  # fmt: skip
app.add_typer(render)


@render.command()
def models(
    cluster: ClusterFile = Path("cluster.yaml"),
    host: OneHost = "",
    model_repository: Base = Path("model_repository"),
) -> None:
    """Triton's model repositories of hosts. Live edits are overwritten."""
    with shown_mistakes():
        deployment = load(cluster)
        for plan in plans_of(deployment, host):
            folder = RenderedFolder(deployment, plan, model_repository)
            written = folder.write(keeps_edits=False)
            console.print(f"{folder.repository}: {', '.join(written) or 'nothing new'}",
                          markup=False, soft_wrap=True)  # fmt: skip


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
    """What is no mistake, and yet may not be meant."""
    etcd = deployment.etcd
    if etcd is not None and etcd.hosts and len(etcd.hosts) % 2 == 0:
        yield f"{len(etcd.hosts)} etcd members outlive no more deaths than {len(etcd.hosts) - 1} do"
    if deployment.is_insecure:
        yield "insecure: whoever reaches the ports may use them, and read and change KV"
    for name in deployment.hosts:
        if host_plan(deployment, name).is_idle:
            yield f"host {name} runs nothing"
    try:
        checkpoint_folder(deployment.checkpoint, f"{deployment.folder}/model_repository")
    except ConfigError as error:
        yield f"on this machine {error}"
