"""`mooncake model`: fetches known models, imports GGUF files, and lists what is here."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from backends.models.catalogue import CHECKPOINTS_DIR, KNOWN, imported_in, is_fetched
from backends.models.fetching import fetch
from backends.models.importing import import_gguf
from backends.models.problems import ModelError
from backends.models.progress import shown_progress

app = typer.Typer(
    name="model",
    help="Fetch a model by name, import a GGUF file, and list the checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@contextmanager
def _errors_to_stderr() -> Iterator[None]:
    """Status 1 for a ModelError, and 143 for SIGTERM, whose partial folder is removed first."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except ModelError as error:
        typer.echo(f"mooncake model: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _say_served(folder: Path, what: str) -> None:
    typer.echo(f"{folder}: {what}")
    typer.echo(f"now:\n  mooncake serve --checkpoint {folder} --dtype bfloat16")


@app.command()
def get(
    name: Annotated[str, typer.Argument(help=f"one of: {', '.join(KNOWN)}")],
    to: Annotated[
        Path | None, typer.Option(help=f"the new folder [default: {CHECKPOINTS_DIR}/NAME]")
    ] = None,
) -> None:
    """Fetch a known model with pip, and make a checkpoint of it."""
    if name not in KNOWN:
        raise typer.BadParameter(f"{name!r} is not known; known: {', '.join(KNOWN)}")
    folder = to or CHECKPOINTS_DIR / name
    with _errors_to_stderr():
        if is_fetched(name, folder):
            typer.echo(f"{folder}: {name} is there already; nothing was done")
            return
        with shown_progress() as progress:
            fetch(name, folder, progress)
        _say_served(folder, name)


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="a GGUF file of a Llama or Qwen2 model")],
    to: Annotated[
        Path | None, typer.Option(help=f"the new folder [default: {CHECKPOINTS_DIR}/NAME]")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help=f"name in {CHECKPOINTS_DIR} [default: the file's]")
    ] = None,
) -> None:
    """Make a checkpoint with weights in bfloat16 from a GGUF file."""
    if to and name:
        raise typer.BadParameter("give --to or --name, not both")
    stem = name or file.stem
    if not to and (Path(stem).name != stem or stem.startswith(".") or stem in KNOWN):
        raise typer.BadParameter(f"{stem!r} cannot name a checkpoint; give --name or --to")
    folder = to or CHECKPOINTS_DIR / stem
    with _errors_to_stderr():
        with shown_progress() as progress:
            is_new = import_gguf(file, folder, progress)
        if is_new:
            _say_served(folder, f"made from {file.name}")
        else:
            typer.echo(f"{folder}: {file.name} is imported already; nothing was done")


@app.command("list")
def list_models() -> None:
    """List the models that can be fetched, and the checkpoints that are here."""
    rows = [("NAME", "STATE", "MB", "PATH")]
    for name, model in KNOWN.items():
        folder = CHECKPOINTS_DIR / name
        if is_fetched(name, folder):
            rows.append((name, "fetched", _megabytes(folder), str(folder)))
        else:
            size = f"{model.folder_bytes / 1e6:.0f}"
            rows.append((name, "not here", size, f"`mooncake model get {name}` fetches it"))
    for folder in imported_in(CHECKPOINTS_DIR):
        rows.append((folder.name, "imported", _megabytes(folder), str(folder)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, state, size, path in rows:
        typer.echo(f"{name:{widths[0]}}  {state:{widths[1]}}  {size:>{widths[2]}}  {path}")


def _megabytes(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.0f}"
