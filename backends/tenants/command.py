"""`mooncake tenants`: makes a key for a tenant, lists tenants and limits, revokes a key.

A new key is printed once. The file has only the SHA-256 of the key. Running servers read the file
again when it changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from backends.tenants import tenants_file
from backends.tenants.api_keys import make_key, sha256_of
from backends.tenants.tenants_file import (
    DEFAULT,
    LIMITS,
    KeyEntry,
    TenantEntry,
    TenantsFile,
    TenantsInvalid,
    tenant_of_entry,
)
from mooncake_store.process.edited_file import sole_writer

app = typer.Typer(
    name="tenants",
    help="API keys, their tenants, and each tenant's limits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
File = Annotated[Path, typer.Argument(help="the file of `mooncake serve --api-keys`")]
ID_CHARACTERS_MIN = 6  # shortest prefix of a key id that `revoke` accepts
LIMIT = "without this option the limit is unchanged; 0 removes the limit"


@contextmanager
def _errors_to_stderr() -> Iterator[None]:
    try:
        yield
    except (TenantsInvalid, OSError) as error:
        typer.echo(f"mooncake tenants: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def add(
    file: File,
    tenant: Annotated[
        str, typer.Argument(help="the tenant's name; an existing tenant gets one more key")
    ],
    note: Annotated[str, typer.Option(help="the key's owner; shown by `list`")] = "",
    salt: Annotated[
        str | None,
        typer.Option(
            help="salt of the tenant's cached KV, by default its name; equal salts share KV"
        ),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="below 0: rejected earlier under load; above 0: later")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=0, help=LIMIT)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=0, help=f"tokens of prompts and answers; {LIMIT}")
    ] = None,
    requests_in_flight_max: Annotated[int | None, typer.Option(min=0, help=LIMIT)] = None,
    stored_responses_bytes_max: Annotated[
        int | None, typer.Option(min=0, help="of responses that are kept (store); 0: none")
    ] = None,
    operator: Annotated[
        bool | None,
        typer.Option(
            "--operator/--no-operator", help="whether the tenant's keys see all decisions"
        ),
    ] = None,
    key: Annotated[bool, typer.Option("--key/--no-key", help="whether to make a key")] = True,
) -> None:
    """Make a key for a tenant and print it once; options set the tenant's limits."""
    given = {
        "salt": salt,
        "priority": priority,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "requests_in_flight_max": requests_in_flight_max,
        "stored_responses_bytes_max": stored_responses_bytes_max,
        "operator": operator,
    }
    changes = {
        name: None if name in LIMITS and value == 0 else value
        for name, value in given.items()
        if value is not None
    }
    with _errors_to_stderr(), sole_writer(file.parent):
        content = tenants_file.read(file) if file.exists() else TenantsFile()
        before = content.tenants.get(tenant, TenantEntry())
        content.tenants[tenant] = msgspec.structs.replace(before, **changes)
        made = make_key()
        if key:
            content.keys.append(KeyEntry(sha256_of(made), tenant, note))
        tenants_file.write(file, content)
    if key:
        typer.echo(f"key of {tenant}, shown only once:", err=True)
        typer.echo(made)
    else:
        typer.echo(f"{tenant}: {shown(tenant, content.tenants[tenant])}")


@app.command("list")
def list_tenants(file: File) -> None:
    """List the tenants, their limits, and the ids of their keys."""
    with _errors_to_stderr():
        content = tenants_file.read(file)
    for name, entry in sorted(content.tenants.items()):
        typer.echo(f"{name}: {shown(name, entry)}")
        for key in content.keys:
            if key.tenant == name:
                typer.echo(f"  key {key.key_id}{f'  {key.note}' if key.note else ''}")
    if DEFAULT not in content.tenants:
        typer.echo(f"{DEFAULT}: {shown(DEFAULT, TenantEntry())}")
    typer.echo(f"requests without a key, at Triton's own ports: {content.keyless}")


@app.command()
def revoke(
    file: File,
    key: Annotated[
        str,
        typer.Argument(
            help="a key's id, as `list` shows it, or the key itself; or a tenant's name"
        ),
    ],
) -> None:
    """Revoke a key, or a tenant with all of its keys.

    The command never prints the key, because its output may stay in a log.
    """
    with _errors_to_stderr(), sole_writer(file.parent):
        content = tenants_file.read(file)
        if key in content.tenants:
            gone = [each for each in content.keys if each.tenant == key]
            del content.tenants[key]
            whose = key
        else:
            gone = [each for each in content.keys if is_named(each, key)]
            if not gone:
                raise TenantsInvalid(f"{file} has no tenant and no key with this name or id")
            if len(gone) > 1:
                raise TenantsInvalid(f"{len(gone)} keys begin with {key}: give more characters")
            whose = f"{gone[0].tenant} ({gone[0].key_id})"
        content.keys = [each for each in content.keys if each not in gone]
        tenants_file.write(file, content)
    typer.echo(f"revoked {len(gone)} key{'s' * (len(gone) != 1)} of {whose}")


def is_named(entry: KeyEntry, given: str) -> bool:
    is_id = len(given) >= ID_CHARACTERS_MIN and entry.sha256.startswith(given)
    return is_id or entry.sha256 == sha256_of(given)


def shown(name: str, entry: TenantEntry) -> str:
    limits = (
        (entry.requests_per_minute, "requests a minute"),
        (entry.tokens_per_minute, "tokens a minute"),
        (entry.requests_in_flight_max, "requests in flight"),
    )
    words = [f"at most {value} {what}" for value, what in limits if value is not None]
    salt = tenant_of_entry(name, entry).salt
    if salt != name:
        words.append(
            "shares cached KV with requests without a tenant" if not salt else "a salt is set"
        )
    if entry.stored_responses_bytes_max:
        words.append(f"stored responses: {entry.stored_responses_bytes_max:,} bytes")
    if entry.operator:
        words.append("operator")
    if entry.priority:
        words.append(f"priority {entry.priority}")
    return ", ".join(words) or "no limits"
