"""`mooncake keys`: make a cluster's keys, add hosts, renew keys, check folders.

No command prints secret keys.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mooncake_store.errors import RequestInvalid, StoreError

WARN_DAYS = 30  # `check` reports certificates that expire within this time
STEP_S_MIN = 120.0  # minimum time between two steps of a renewal, unless --now is given
NEXT = {
    "prepare": "The next generation is trusted, the current one is used.",
    "switch": "The next generation is used, the old one is still trusted.",
    "retire": "The old generation is no longer trusted.",
}
COPY = (
    "Copy to each host its folder ({folder}/HOST). Processes read new keys by themselves. If a "
    "host's certificate has changed, its launcher drains and restarts its workers one by one"
)

app = typer.Typer(
    name="keys",
    help="Keys and certificates for authentication between the hosts of a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Folder = Annotated[Path, typer.Argument(help="folder of the authority, for example `keys`")]
Days = Annotated[int, typer.Option(min=1, help="validity of new host certificates, in days")]


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
            "NAME alone for a host without a member of etcd; repeatable"
        ),
    ] = None,
) -> None:
    """Create a cluster's keys, with these hosts."""
    from mooncake_store.keys.authority import Authority

    with _refusals():
        authority = Authority.begun(folder)
        for each in host or []:
            name, _, address = each.partition("=")
            authority.add_host(name, address=address)
        typer.echo(f"made keys of {len(host or [])} hosts in {folder}")
        typer.echo(f"Keep {folder}/authority on this machine; copy {folder}/HOST to each host.")


@app.command("add-host")
def add_host(
    folder: Folder,
    host: Annotated[
        str, typer.Argument(help="name in the cluster file, or NAME=ADDRESS (as for init)")
    ],
    days: Days = 365,
    directory: Annotated[
        bool | None,
        typer.Option(
            "--directory/--no-directory",
            help="whether a directory may run on the host, which then gets the directory's key "
            "(default: unchanged; yes for a new host)",
        ),
    ] = None,
) -> None:
    """Make keys for a new host, or a new certificate for a known host."""
    from mooncake_store.keys.authority import Authority

    with _refusals():
        name, _, address = host.partition("=")
        Authority.read(folder).add_host(name, directory, days, address)
        typer.echo(f"made keys of host {name} in {folder / name}")
        typer.echo(COPY.format(folder=folder) + ".")


@app.command("remove-host")
def remove_host(folder: Folder, host: str) -> None:
    """Remove a host. Renew the keys afterwards, because the host may still have its folder."""
    from mooncake_store.keys.authority import Authority

    with _refusals():
        authority = Authority.read(folder)
        authority.remove_host(host)
        typer.echo(f"removed host {host}. {COPY.format(folder=folder)}.")
        typer.echo(
            "The host may still have a valid certificate and the cluster's keys: rotate "
            f"{authority.state.steps_to_forget} times, and copy the folders after each. The "
            "cluster's secret is not renewed; it gives no access without a certificate or keys."
        )


@app.command()
def rotate(
    folder: Folder,
    days: Days = 365,
    now: Annotated[
        bool, typer.Option("--now", help="without the minimum time since the last step")
    ] = False,
) -> None:
    """Renew all keys, in three steps that overlap: prepare, switch, retire."""
    from mooncake_store.keys.authority import Authority

    with _refusals():
        authority = Authority.read(folder)
        pause_s = authority.age_s()
        if authority.state.next_step != "prepare" and pause_s < STEP_S_MIN and not now:
            raise RequestInvalid(
                f"keys were last written {pause_s:.0f} s ago, and hosts need minutes to restart "
                "their workers. Frontends cannot call a worker that is two steps behind. Wait "
                "until `mooncake cluster status` shows every worker restarted, or pass --now"
            )
        step = authority.rotate(days)
        typer.echo(f"{step}: {NEXT[step]}")
        typer.echo(f"{COPY.format(folder=folder)}.")
        if step != "retire":
            typer.echo(
                "When every worker has restarted (see `mooncake cluster status`), run `mooncake "
                f"keys rotate {folder}` again. Its next step is {authority.state.next_step}."
            )


@app.command()
def show(folder: Folder) -> None:
    """Show the hosts, the generations, and the validity of certificates."""
    from mooncake_store.keys.authority import Authority
    from mooncake_store.keys.tls import certificate_in

    with _refusals():
        state = Authority.read(folder).state
        numbers = ", ".join(str(each.number) for each in state.generations)
        typer.echo(f"generations trusted: {numbers}; used: {state.used}")
        typer.echo(f"next step of `mooncake keys rotate`: {state.next_step}")
        for host, may_direct in sorted(state.hosts.items()):
            until = certificate_in(folder / host).not_valid_after_utc
            role = "" if may_direct else ", without the directory's key"
            named = f" of {state.addresses[host]}" if host in state.addresses else ""
            typer.echo(f"{host}: certificate{named} until {until:%Y-%m-%d}{role}")


@app.command()
def check(folder: Folder) -> None:
    """Print every problem of a host's folder, or of all hosts' folders; exit with 1 if any."""
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
