"""Shared parts of the `mooncake cluster` commands: options, output, error messages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from backends.cluster.deployment import ClusterFileInvalid, Deployment
from backends.cluster.host_plan import HostPlan, host_plan
from backends.cluster.model_rendering import TemplateMissing
from mooncake_store.errors import StoreError

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

ClusterFile = Annotated[Path, typer.Option("--cluster", help="The cluster file.")]
OneHost = Annotated[str, typer.Option("--host", help="This host only (default: all).")]
KeysOf = Annotated[
    str, typer.Option(help="Use the keys of this host (default: the keys on this machine).")
]
Base = Annotated[
    Path, typer.Option("--model-repository", help="The model repository to render from.")
]


@contextlib.contextmanager
def shown_mistakes() -> Iterator[None]:
    """Print mistakes of the file to stderr and exit with status 1."""
    try:
        yield
    except (ClusterFileInvalid, TemplateMissing, StoreError, OSError) as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        sys.exit(1)


def print_line(line: str) -> None:
    """Print a line without markup and without wrapping."""
    console.print(line, markup=False, soft_wrap=True)


def plans_of(deployment: Deployment, host: str) -> list[HostPlan]:
    """The plan of `host`, or of all hosts if it is ""; BadParameter for an unknown host."""
    if host and host not in deployment.hosts:
        known = ", ".join(deployment.hosts)
        raise typer.BadParameter(f"there is no host {host!r} in {deployment.path}; known: {known}")
    return [host_plan(deployment, name) for name in ([host] if host else deployment.hosts)]
