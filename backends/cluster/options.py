"""What the commands of `mooncake cluster` have in common: options, where they print, mistakes."""

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
    str, typer.Option(help="Ask with the keys of this host (default: those that are here).")
]
Base = Annotated[
    Path, typer.Option("--model-repository", help="The models that hosts' ones are rendered from.")
]


@contextlib.contextmanager
def shown_mistakes() -> Iterator[None]:
    """A file with mistakes becomes lines on stderr and exit status 1."""
    try:
        yield
    except (ClusterFileInvalid, TemplateMissing, StoreError, OSError) as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        sys.exit(1)


def say(line: str) -> None:
    """As it is, whatever the width of the terminal."""
    console.print(line, markup=False, soft_wrap=True)


def plans_of(deployment: Deployment, host: str) -> list[HostPlan]:
    """Of this host, or of all; BadParameter when there is no such host."""
    if host and host not in deployment.hosts:
        known = ", ".join(deployment.hosts)
        raise typer.BadParameter(f"there is no host {host!r} in {deployment.path}; known: {known}")
    return [host_plan(deployment, name) for name in ([host] if host else deployment.hosts)]
