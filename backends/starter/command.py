"""`mooncake init`: makes a model repository with a checkpoint, to serve and to edit.

The new folder has the shipped models and a copy of the demo checkpoint, which the models use. The
content is written into a temporary folder, which is then renamed, so the new folder is complete or
missing. If the new folder exists and is empty, the content is moved into it entry by entry.

With the engine vllm, workers get its parameters with their defaults. Not here: worker folders for
TensorRT-LLM, each of which needs GPUs of its own (deploy/).
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from backends.cluster.model_rendering import (
    CONFIG,
    ROLES,
    backend_named,
    parameters_of,
    templates_in,
    with_parameters,
)
from backends.engine.vllm.settings import VllmConfig
from backends.shipped import shipped_checkpoint, shipped_repository

CHECKPOINT = "demo_checkpoint"
# The files that a server reads, and the README. Other files of the demo checkpoint are not copied.
CHECKPOINT_FILES = ("*.json", "*.safetensors", "README.md")
OF_VLLM = {"engine": "vllm", **{each.name: str(each.default) for each in fields(VllmConfig)}}
COMMENT = "Of the engine vllm: docs/reference/parameters.md."


class FolderInUse(Exception):
    """The path exists and is not an empty folder. The message names the remedy."""


def init(
    folder: Annotated[Path, typer.Argument(help="A new folder, for `serve --model-repository`.")],
    engine: Annotated[
        Literal["torch", "vllm"], typer.Option(help="Engine of the workers. vllm: see `make vllm`.")
    ] = "torch",
) -> None:
    """Make a model repository with the demo checkpoint, to serve and to edit."""
    try:
        models = lay_down(folder, engine)
    except (FolderInUse, OSError) as problem:
        why = f"{folder}: {problem.strerror}" if isinstance(problem, OSError) else problem
        raise SystemExit(f"cannot make a model repository: {why}") from None
    console = Console(highlight=False)
    lines = (
        f"{folder}: {', '.join(models)}; they serve {folder / CHECKPOINT}",
        "now:",
        f"  mooncake serve --model-repository {folder}",
    )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def lay_down(folder: Path, engine: str = "torch") -> list[str]:
    """Make the folder and return the names of its models. Raises FolderInUse or OSError, and then
    leaves no incomplete folder."""
    folder = folder.resolve()  # servers resolve links before they use relative paths
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderInUse(f"{folder} is not an empty folder: name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as partial:
        whole = Path(partial) / folder.name
        models = _write_models(whole, engine)
        (whole / CHECKPOINT).mkdir()
        for pattern in CHECKPOINT_FILES:
            for path in shipped_checkpoint().glob(pattern):
                shutil.copyfile(path, whole / CHECKPOINT / path.name)
        _take_over(whole, folder)
    return models


def _take_over(whole: Path, folder: Path) -> None:
    if not folder.exists():
        whole.rename(folder)
        return
    # The existing folder stays, because it may be the working directory of a shell.
    for path in whole.iterdir():
        path.rename(folder / path.name)


def _write_models(repository: Path, engine: str) -> list[str]:
    templates = templates_in(shipped_repository())
    for model, text in templates.items():
        if parameters_of(text).get("checkpoint") == "demo":
            # A relative path starts at the parent folder of the repository (config_pbtxt.py).
            text = with_parameters(text, {"checkpoint": f"{repository.name}/{CHECKPOINT}"})
        if engine == "vllm" and backend_named(text) in ROLES:
            text = with_parameters(text, OF_VLLM, COMMENT)
        (repository / model / "1").mkdir(parents=True)  # Triton needs a folder for each version
        (repository / model / CONFIG).write_text(text, encoding="utf-8")
    return list(templates)
