"""The commands of `mooncake cluster`. Each reads the cluster file anew; errors end in its lines.

Not here: what they look at and write (the other modules of this room), serving
(backends/launcher/command.py).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from backends.cluster.cluster_file import load
from backends.cluster.deployment import Deployment
from backends.cluster.drain import HostDrain
from backends.cluster.host_plan import HostPlan, host_plan
from backends.cluster.operator import join_as_operator
from backends.cluster.options import (
    Base,
    ClusterFile,
    KeysOf,
    OneHost,
    console,
    errors,
    plans_of,
    say,
    shown_mistakes,
)
from backends.cluster.render_command import render
from backends.cluster.rendered_folder import RenderedFolder
from backends.cluster.status import DOWN, FleetStatus, fleet_status
from backends.config_pbtxt import checkpoint_folder
from backends.errors import ConfigError
from mooncake_store.cli.arguments import shown_bytes

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A deployment of several hosts, as one file describes it: check, render, show, drain.",
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
        deployment = load(cluster, model_repository)
        plans = plans_of(deployment, host)
        console.print(_hosts_table(deployment, plans))
        for note in _notes(deployment):
            say(f"note: {note}")
        for plan in plans:
            for difference in RenderedFolder(deployment, plan, model_repository).differences():
                if host or difference.kind != "missing":  # other hosts have theirs on their disks
                    say(f"{plan.host}: {difference}")
    say(f"{cluster} is right")


@app.command()
def status(
    cluster: ClusterFile = Path("cluster.yaml"),
    keys_of: KeysOf = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """All hosts: etcd, directory, storage nodes, frontends, workers.

    The exit status is 1 if anything that the file names is down, with a line for each; 0 if not.
    Frontends that listen on loopback cannot be asked and do not count.
    """
    with shown_mistakes():
        deployment = load(cluster)
        found = fleet_status(deployment, join_as_operator(deployment, keys_of))
        if as_json:
            console.file.write(json.dumps(asdict(found)) + "\n")
        else:
            console.print(_status_table(deployment, found))
            for stranger in found.strangers:
                say(f"not in the file: {stranger}")
            for line in (each for host in found.hosts for each in host.down):
                say(line)
            if found.problem:
                say(f"the directory does not answer: {found.problem}")
    if not found.is_well:
        sys.exit(1)


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="The host to empty, of the file or elastic.")],
    cluster: ClusterFile = Path("cluster.yaml"),
    undo: Annotated[bool, typer.Option("--undo", help="It takes requests and blocks again.")] = (
        False
    ),
    requests_s: Annotated[
        float, typer.Option(help="Requests that are not at their end then are moved.")
    ] = 30.0,
    deadline_s: Annotated[float, typer.Option(help="Give up after so many seconds.")] = 600.0,
    keys_of: KeysOf = "",
) -> None:
    """Empty a host so that it can be stopped: requests end or move, its only copies are copied."""
    with shown_mistakes():
        deployment = load(cluster)
        if host not in deployment.hosts and not deployment.elastic_pools:
            plans_of(deployment, host)  # says which hosts there are
        with contextlib.closing(
            HostDrain(deployment, host, join_as_operator(deployment, keys_of))
        ) as draining:
            if not draining.is_known:
                errors.print(f"the directory knows nothing of a host {host!r}", markup=False)
                sys.exit(1)
            if undo:
                draining.undo()
                say(f"{host} takes requests and blocks again")
                return
            left = draining.run(requests_s, deadline_s, say)
        if host in deployment.frontends.hosts:
            say(f"{host} has a frontend: its streams end when it stops; send clients elsewhere")
        if left.is_empty:
            say(f"{host} is empty of what others lack: it can be stopped")
            return
        errors.print(
            f"{left.requests} requests and {left.blocks} blocks are on {host} alone: the others "
            "have no room for them, or it took too long. Drain again, or stop it and lose them."
        )
    sys.exit(1)


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
