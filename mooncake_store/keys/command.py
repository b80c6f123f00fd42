"""`mooncake keys`: make a cluster's keys, add hosts, renew them, look whether a folder is usable.

No command prints what is private.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mooncake_store.errors import RequestInvalid, StoreError

WARN_DAYS = 30
STEP_S_MIN = 120.0  # between two steps of a renewal
NEXT = {
    "prepare": "The next generation is believed, the one of now is used.",
    "switch": "The next generation is used, the old one is still believed.",
    "retire": "The old generation is believed no more.",
}
COPY = (
    "Copy to each host its folder ({folder}/HOST). All of it is read again by itself; workers' "
    "Tritons are drained and started again for it, one after the other"
)

app = typer.Typer(
    name="keys",
    help="Keys and certificates by which the hosts of a cluster know each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Folder = Annotated[Path, typer.Argument(help="where keys are made, as `keys`")]
Days = Annotated[int, typer.Option(min=1, help="its certificate is valid for so long")]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (StoreError, OSError) as error:
        typer.echo(f"mooncake keys: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def init(
    folder: Folder,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="a host and its address, both as in the cluster file: NAME=ADDRESS; "
            "NAME alone where no member of etcd runs; repeatable"
        ),
    ] = None,
) -> None:
    """Begin a cluster's keys, with these hosts."""
    from mooncake_store.keys.authority import Authority

    with _refusals():
        authority = Authority.begun(folder)
        for each in host or []:
            name, _, address = each.partition("=")
            authority.add_host(name, address=address)
        typer.echo(f"made keys of {len(host or [])} hosts in {folder}")
        typer.echo(f"Keep {folder}/authority where it is; copy {folder}/HOST to each host.")


@app.command("add-host")
def add_host(
    folder: Folder,
    host: Annotated[
        str, typer.Argument(help="its name in the cluster file, or NAME=ADDRESS (as for init)")
    ],
    days: Days = 365,
    directory: Annotated[
        bool | None,
        typer.Option(
            "--directory/--no-directory",
            help="whether a directory may run there: it gets the directory's key "
            "(as it is; yes for a new host)",
        ),
    ] = None,
) -> None:
    """Keys for one more host, or a fresh certificate for one that is there."""
    from mooncake_store.keys.authority import Authority

    with _refusals():
        name, _, address = host.partition("=")
        Authority.read(folder).add_host(name, directory, days, address)
        typer.echo(f"made keys of host {name} in {folder / name}")
        typer.echo(COPY.format(folder=folder) + ", if its certificate changed.")


@app.command("remove-host")
def remove_host(folder: Folder, host: str) -> None:
    """Let a host in no more. Its folder may have been copied: renew the keys afterwards."""
    from mooncake_store.keys.authority import Authority

    with _refusals():
        authority = Authority.read(folder)
        authority.remove_host(host)
        typer.echo(f"removed host {host}. {COPY.format(folder=folder)}.")
        typer.echo(
            "It still has a valid certificate and the cluster's keys: rotate "
            f"{authority.state.steps_to_forget} times, and copy the folders after each. Only the "
            "cluster's secret stays, which opens no door without these."
        )


@app.command()
def rotate(
    folder: Folder,
    days: Days = 365,
    now: Annotated[
        bool, typer.Option("--now", help="however short ago the step before was")
    ] = False,
) -> None:
    """Renew all keys, in three steps that overlap: prepare, switch, retire."""
    from mooncake_store.keys.authority import Authority

    with _refusals():
        authority = Authority.read(folder)
        pause_s = authority.age_s()
        if authority.state.next_step != "prepare" and pause_s < STEP_S_MIN and not now:
            raise RequestInvalid(
                f"keys were written {pause_s:.0f} s ago, and hosts need minutes to begin anew: a "
                "worker that still has what two steps before was believed is called by nobody. "
                "Look at `mooncake cluster status`; --now goes on all the same"
            )
        step = authority.rotate(days)
        typer.echo(f"{step}: {NEXT[step]}")
        typer.echo(f"{COPY.format(folder=folder)}.")
        if step != "retire":
            typer.echo(
                "When every worker has begun anew (`mooncake cluster status`), "
                f"`mooncake keys rotate {folder}` again: it will {authority.state.next_step}."
            )


@app.command()
def show(folder: Folder) -> None:
    """The hosts, the generations and how long certificates are valid."""
    from mooncake_store.keys.authority import Authority
    from mooncake_store.keys.tls import certificate_facts

    with _refusals():
        state = Authority.read(folder).state
        numbers = ", ".join(str(each.number) for each in state.generations)
        typer.echo(f"generations believed: {numbers}; used: {state.used}")
        typer.echo(f"`mooncake keys rotate` would {state.next_step}")
        for host, may_direct in sorted(state.hosts.items()):
            until = certificate_facts(folder / host).until
            role = "" if may_direct else ", no directory may run there"
            named = f" of {state.addresses[host]}" if host in state.addresses else ""
            typer.echo(f"{host}: certificate{named} until {until:%Y-%m-%d}{role}")


@app.command()
def check(folder: Folder) -> None:
    """Every problem of a host's folder, or of all hosts' folders; ends with 1 if there is one."""
    from mooncake_store.keys.folder import ZEROMQ, Keys
    from mooncake_store.keys.tls import certificate_problems

    hosts = sorted(each.parent for each in folder.glob(f"*/{ZEROMQ}")) or [folder]
    found = []
    for host in hosts:
        try:
            keys = Keys(host)
            found += certificate_problems(keys, datetime.timedelta(days=WARN_DAYS))
        except StoreError as error:
            found.append(str(error))
    for line in found:
        typer.echo(f"- {line}")
    if found:
        raise typer.Exit(1)
    typer.echo(f"{len(hosts)} folder{'s' * (len(hosts) > 1)} of keys: no problem")
