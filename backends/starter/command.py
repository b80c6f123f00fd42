"""`mooncake init`: makes a model repository with a checkpoint, to serve and to edit.

The new folder has the shipped models and a copy of the demo checkpoint, which the models use. The
content is written into a temporary folder, which is then renamed, so the new folder is complete or
missing. If the new folder exists and is empty, the content is moved into it entry by entry.

With the engine vllm, workers get its parameters with their defaults. With the engine tensorrt_llm,
the parameters come from the model.yaml of TensorRT-LLM's own Triton model. Then there is one worker
of each role, because each needs GPUs, and the checkpoint is not copied.

Not here: the conversion of a model.yaml (llmapi.py), worker folders for GPUs (deploy/).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
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
from backends.starter.llmapi import (
    LlmapiRefused,
    checkpoint_of,
    convert,
    converted_models,
    read_fields,
    refuse_mistakes,
)

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
        Literal["torch", "vllm", "tensorrt_llm"] | None,
        typer.Option(
            help="Engine of the workers: torch, if not set; vllm: see `make vllm`; tensorrt_llm: "
            "with --from-llmapi, which selects it."
        ),
    ] = None,
    from_llmapi: Annotated[
        Path | None,
        typer.Option(help="A model.yaml of TensorRT-LLM's Triton model `llmapi`, to convert."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="With --from-llmapi: the model's folder, if `model` is not a folder."),
    ] = None,
) -> None:
    """Make a model repository with the demo checkpoint, to serve and to edit."""
    chosen = engine or ("tensorrt_llm" if from_llmapi is not None else "torch")
    if (chosen == "tensorrt_llm") != (from_llmapi is not None):
        raise typer.BadParameter("--engine tensorrt_llm and --from-llmapi need each other")
    if checkpoint is not None and from_llmapi is None:
        raise typer.BadParameter("--checkpoint needs --from-llmapi")
    try:
        if from_llmapi is not None:
            lines = _init_converted(folder, from_llmapi, checkpoint)
        else:
            models = lay_down(folder, chosen)
            lines = [f"{folder}: {', '.join(models)}; they serve {folder / CHECKPOINT}"]
    except (FolderInUse, OSError, LlmapiRefused) as problem:
        why = f"{folder}: {problem.strerror}" if isinstance(problem, OSError) else problem
        raise SystemExit(f"cannot make a model repository: {why}") from None
    console = Console(highlight=False)
    for line in (*lines, "now:", f"  mooncake serve --model-repository {folder}"):
        console.print(line, markup=False, soft_wrap=True)


def _init_converted(folder: Path, source: Path, checkpoint: Path | None) -> list[str]:
    """Make the folder from a model.yaml. Returns the lines to print."""
    try:
        named = read_fields(source)
    except OSError as error:
        raise LlmapiRefused(source, [f"cannot be read: {error.strerror}"]) from None
    found = convert(source, named, checkpoint_of(source, named, checkpoint))
    texts = converted_models(templates_in(shipped_repository()), found)
    refuse_mistakes(source, texts)
    _write(folder, texts)
    return [*found.table(), "", f"{folder}: {', '.join(texts)}"]


def lay_down(folder: Path, engine: str = "torch") -> list[str]:
    """Make the folder and return the names of its models. Raises FolderInUse or OSError, and then
    leaves no incomplete folder."""
    texts = _shipped_models(folder.resolve().name, engine)
    _write(folder, texts, CHECKPOINT_FILES)
    return list(texts)


def _write(folder: Path, texts: Mapping[str, str], of_checkpoint: Sequence[str] = ()) -> None:
    """`of_checkpoint`: patterns of files of the demo checkpoint, which are copied beside the
    models."""
    folder = folder.resolve()  # servers resolve links before they use relative paths
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderInUse(f"{folder} is not an empty folder: name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as partial:
        whole = Path(partial) / folder.name
        for model, text in texts.items():
            (whole / model / "1").mkdir(parents=True)  # Triton needs a folder for each version
            (whole / model / CONFIG).write_text(text, encoding="utf-8")
        if of_checkpoint:
            (whole / CHECKPOINT).mkdir()
        for pattern in of_checkpoint:
            for path in shipped_checkpoint().glob(pattern):
                shutil.copyfile(path, whole / CHECKPOINT / path.name)
        _take_over(whole, folder)


def _take_over(whole: Path, folder: Path) -> None:
    if not folder.exists():
        whole.rename(folder)
        return
    # The existing folder stays, because it may be the working directory of a shell.
    for path in whole.iterdir():
        path.rename(folder / path.name)


def _shipped_models(repository: str, engine: str) -> dict[str, str]:
    """Model -> text of its config.pbtxt. `repository`: name of the folder."""
    texts = {}
    for model, text in templates_in(shipped_repository()).items():
        if parameters_of(text).get("checkpoint") == "demo":
            # A relative path starts at the parent folder of the repository (config_pbtxt.py).
            text = with_parameters(text, {"checkpoint": f"{repository}/{CHECKPOINT}"})
        if engine == "vllm" and backend_named(text) in ROLES:
            text = with_parameters(text, OF_VLLM, COMMENT)
        texts[model] = text
    return texts
