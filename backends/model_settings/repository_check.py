"""Finds the mistakes of a model repository, before Triton loads the models.

Each file is checked by the code that a model runs when it loads (config_pbtxt.py). Then the models
are checked together: parameters that all workers must share, both roles, storage nodes, pipeline
stages, steps of an ensemble. The caller reads all files.

Not here: reading folders (repository_files.py), a host's GPUs and memory (backends/doctor).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from backends import tensors
from backends.cluster.cluster_file import FINGERPRINT
from backends.cluster.model_rendering import ROLES
from backends.config_pbtxt import (
    KV_PAGES_IS_OLD,
    MORE_FRONTENDS,
    MORE_WORKERS,
    OLD_NAMES,
    FrontendConfig,
    TokenizerConfig,
    WorkerConfig,
    check_configs,
)
from backends.errors import ConfigError
from backends.model_settings.model_file import TAKE_ANOTHER, ModelFile, read_model_file
from backends.triton.worker_kinds import config_classes
from conductor.config import ConductorConfig

# Backend -> its configuration classes. The classes of a worker depend on the worker's parameters.
CLASSES: Mapping[str, tuple[type[Any], ...]] = {
    "conductor": (FrontendConfig, ConductorConfig),
    "preprocessing": (TokenizerConfig,),
    "postprocessing": (TokenizerConfig,),
}
INPUTS = (*tensors.SUPPORTED_INPUTS, *tensors.UNSUPPORTED_INPUTS)
STAGES_MAX = 1024  # stages of a pipeline group that are searched for gaps
# Parameters that must be equal in a pipeline group, beside FINGERPRINT, which all workers share.
OF_A_GROUP = ("kv_bytes", "kv_pages", "context_tokens_max", "chunk_tokens")


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Properties of a checkpoint's folder that the checks use."""

    problems: tuple[str, ...] = ()  # problems for every model with this checkpoint
    torch_problems: tuple[str, ...] = ()  # problems only for workers with the engine torch
    context_tokens_max: int = 0  # limit of prompt and output tokens together; 0: unknown
    layers: int = 0  # number of layers; 0: unknown


@dataclass(frozen=True, slots=True)
class RepositoryFindings:
    mistakes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # valid settings that may not be intended


LookUp = Callable[[str], CheckpointFacts]  # argument: the value of a parameter `checkpoint`


def check_repository(
    texts: Mapping[str, str],
    checkpoint: LookUp,
    nodes: Collection[str] | None = None,
    versionless: Collection[str] = (),
) -> RepositoryFindings:
    """Find mistakes and notes. `texts`: model -> content of its config.pbtxt.

    `nodes`: names of the storage nodes. None: missing nodes, roles and pipeline stages are no
    mistakes, because other hosts have them. `versionless`: models without a version folder.
    """
    found = RepositoryFindings()
    files = []
    for model, text in texts.items():
        try:
            files.append(read_model_file(model, text))
        except ConfigError as error:
            found.mistakes.append(str(error))
    for model in versionless:
        found.mistakes.append(f"{model}: has no version folder; make one: mkdir {model}/1")
    for file in files:
        found.mistakes.extend(f"{file.model}: {what}" for what in model_mistakes(file))
        found.notes.extend(f"{file.model}: {what}" for what in _model_notes(file))
    workers = [file for file in files if file.is_worker]
    found.mistakes.extend(_disagreements(files, workers))
    found.mistakes.extend(_checkpoint_mistakes(files, checkpoint))
    found.mistakes.extend(_group_mistakes(workers))
    for file in files:
        for step in file.steps:
            if step not in texts:
                found.mistakes.append(f"{file.model}: there is no model {step!r} for its step")
    if nodes is not None:
        found.mistakes.extend(_missing_parts(workers, nodes))
    return found


def model_mistakes(file: ModelFile) -> Iterator[str]:
    """The problems that Triton and the model would report when the model loads."""
    if file.name and file.name != file.model:
        yield f"name is {file.name!r}, but the folder is {file.model!r}; remove the name"
    if not file.text.strip():
        yield f"its config.pbtxt is empty; {TAKE_ANOTHER}"
    classes, together = classes_of(file)
    if not classes:
        return
    named = {OLD_NAMES.get(name, name): value for name, value in file.parameters.items()}
    yield from check_configs(classes, named, together)[1]
    if file.instances != 1:
        more = MORE_FRONTENDS if FrontendConfig in classes else MORE_WORKERS
        yield f"instance_group count is {file.instances}; use 1. {more}"
    if file.backend == "conductor":
        yield from _tensor_mistakes(file)


def classes_of(file: ModelFile) -> tuple[tuple[type[Any], ...], Any]:
    """(configuration classes of a model, common check). The common check takes one instance of each
    class and yields mistakes. A backend of another project has no classes: ()."""
    if file.backend in ROLES:
        return config_classes(file.backend, file.parameters)
    return CLASSES.get(file.backend, ()), lambda *configs: ()


def defaults_of(file: ModelFile) -> dict[str, str]:
    """Parameter -> its default value as text."""
    return {
        each.name: _written(each.default) for cls in classes_of(file)[0] for each in fields(cls)
    }


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tensor_mistakes(file: ModelFile) -> Iterator[str]:
    tables = (("input", file.inputs, INPUTS), ("output", file.outputs, tensors.OUTPUTS))
    for kind, declared, table in tables:
        for tensor in table:
            is_declared = tensor.name in declared
            if is_declared and declared[tensor.name] != tensor.dtype:
                yield (
                    f"{kind} {tensor.name} is TYPE_{declared[tensor.name]}; "
                    f"it must be TYPE_{tensor.dtype}"
                )
            elif not is_declared and kind == "output":
                yield f"output {tensor.name} is missing; copy it from the shipped config.pbtxt"


def _model_notes(file: ModelFile) -> Iterator[str]:
    if file.text.strip() and not file.backend:
        yield "config.pbtxt names no backend; Triton guesses one from the model's files"
    for old, new in OLD_NAMES.items():
        if old in file.parameters:
            yield f"{old} is now called {new}; rename it"
    if "kv_pages" in file.parameters and file.backend in ROLES:
        yield KV_PAGES_IS_OLD
    if file.backend == "conductor":
        missing = [each.name for each in INPUTS if each.name not in file.inputs]
        if missing:
            yield f"clients cannot send {', '.join(missing)}: add the inputs of the shipped file"


def _disagreements(files: list[ModelFile], workers: list[ModelFile]) -> Iterator[str]:
    for name in FINGERPRINT:
        alike = files if name == "checkpoint" else workers
        models = defaultdict(list)
        for file in alike:
            defaults = defaults_of(file)
            if name in defaults:
                models[file.value(name, defaults[name])].append(file.model)
        if len(models) > 1:
            values = "; ".join(f"{value} in {', '.join(each)}" for value, each in models.items())
            group = "all models" if name == "checkpoint" else "all workers"
            yield f"{group} need the same {name} to share stored blocks, but have {values}"


def _checkpoint_mistakes(files: list[ModelFile], look_up: LookUp) -> Iterator[str]:
    readers = defaultdict(list)
    for file in files:
        if classes_of(file)[0]:
            readers[file.value("checkpoint", "demo")].append(file)
    for checkpoint, models in readers.items():
        facts = look_up(checkpoint)
        names = ", ".join(file.model for file in models)
        is_torch = any(
            file.is_worker and file.value("engine", "torch") == "torch" for file in models
        )
        problems = (*facts.problems, *(facts.torch_problems if is_torch else ()))
        yield from (f"{names}: checkpoint {checkpoint}: {what}" for what in problems)
        for file in models:
            wanted = file.value("context_tokens_max", 0)
            allowed = facts.context_tokens_max
            if allowed and wanted.isdecimal() and int(wanted) > allowed:
                yield (
                    f"{file.model}: context_tokens_max is {wanted}, but the checkpoint allows "
                    f"{allowed}; lower it or leave it 0"
                )
            stages = file.value("pipeline_stages", 1)
            if facts.layers and stages.isdecimal() and int(stages) > facts.layers:
                yield (
                    f"{file.model}: pipeline_stages is {stages}; the checkpoint has "
                    f"{facts.layers} layers"
                )


def _pipeline_groups(workers: list[ModelFile]) -> dict[str, list[ModelFile]]:
    groups = defaultdict(list)
    for file in workers:
        if group := file.value("pipeline_group"):
            groups[group].append(file)
    return groups


def _group_mistakes(workers: list[ModelFile]) -> Iterator[str]:
    for group, stages in _pipeline_groups(workers).items():
        taken: dict[str, str] = {}
        for file in stages:
            number = file.value("pipeline_stage", 0)
            if other := taken.get(number):
                yield f"{file.model}: is stage {number} of {group}, like {other}; renumber it"
            taken[number] = file.model
        for name in ("pipeline_stages", *OF_A_GROUP):
            values = {file.model: file.value(name, "default") for file in stages}
            if len(set(values.values())) > 1:
                found = ", ".join(f"{model} {value}" for model, value in values.items())
                yield f"the stages of {group} need the same {name}: {found}"


def _missing_parts(workers: list[ModelFile], nodes: Collection[str]) -> Iterator[str]:
    for file in workers:
        node = file.value("store_node", WorkerConfig().store_node)
        if node and node not in nodes:
            known = ", ".join(nodes) or "none"
            yield (
                f"{file.model}: there is no storage node {node!r} (--nodes: {known}); set its "
                "store_node, or name the node"
            )
    for role in ROLES:
        if not any(file.backend == role for file in workers):
            yield f"no model has the backend {role!r}: requests need a worker of both roles"
    for group, files in _pipeline_groups(workers).items():
        counts: dict[int, int] = {}  # stage -> parameter pipeline_stages in its config.pbtxt
        for file in files:
            stage, count = file.value("pipeline_stage", 0), file.value("pipeline_stages", 1)
            if stage.isdecimal() and count.isdecimal():
                counts[int(stage)] = min(int(count), STAGES_MAX)
        for missing in sorted(set(range(max(counts.values(), default=0))) - counts.keys()):
            yield f"pipeline group {group} has no stage {missing}: it accepts no requests"
