"""The commands of `mooncake cluster`. Each reads the cluster file anew; errors end in its lines.

Not here: what they look at and write (the other modules of this room), serving
(backends/launcher/command.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer
from rich.table import Table

from backends.cluster.cluster_file import load
from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import HostPlan, host_plan
from backends.cluster.options import Base, ClusterFile, OneHost, console, plans_of, shown_mistakes
from backends.cluster.render_command import render
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
app.add_typer(render)


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
