"""The choice as a model repository for `mooncake serve --model-repository`.

It is made from the shipped repository, with the same comments and tensors. It has a folder for each
worker with a storage node of its own, as simulated, and the models that clients call.

Not here: how a config.pbtxt is rendered (backends/cluster/model_rendering.py).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path

from backends.cluster.model_rendering import (
    CONFIG,
    ROLES,
    backend_named,
    parameters_of,
    template,
    templates_in,
    with_parameters,
)
from backends.shipped import shipped_repository
from conductor import ConductorConfig
from loadtest.planner.engine import PlannedEngine
from loadtest.planner.fleet_run import FleetPlan, FleetRun, ServiceLevels
from mooncake_store.layout import memory_bytes_for
from mooncake_store.records.membership import UNIT_BYTES

REPOSITORY = "model_repository"
REQUESTS_MIN, REQUESTS_MAX = 256, 4_096  # requests_max: as shipped, and the largest of a frontend


def write_overlay(
    folder: Path, run: FleetRun, engine: PlannedEngine, levels: ServiceLevels
) -> Path:
    """Write the repository, without models of earlier plans; OSError when that fails."""
    repository = folder / REPOSITORY
    texts = overlay_texts(run, engine, levels)
    for config in repository.glob(f"*/{CONFIG}"):
        if config.parent.name not in texts:
            config.unlink()
    for model, text in texts.items():
        (repository / model / "1").mkdir(parents=True, exist_ok=True)
        (repository / model / "1" / ".gitkeep").touch()
        (repository / model / CONFIG).write_text(text, encoding="utf-8")
    return repository


def overlay_texts(run: FleetRun, engine: PlannedEngine, levels: ServiceLevels) -> dict[str, str]:
    templates = templates_in(shipped_repository())
    checkpoint = engine.parameters().get("checkpoint", "demo")
    found: dict[str, str] = {}
    for model, text in templates.items():
        if backend_named(text) == "conductor":
            found[model] = with_parameters(
                text,
                {
                    **conductor_parameters(run.plan.config(levels), parameters_of(text)),
                    "checkpoint": checkpoint,
                    "requests_max": str(
                        min(max(REQUESTS_MIN, 2 * run.in_flight_max), REQUESTS_MAX)
                    ),
                },
            )
        elif backend_named(text) not in ROLES:
            has_one = "checkpoint" in parameters_of(text)
            found[model] = with_parameters(text, {"checkpoint": checkpoint} if has_one else {})
    for number in range(run.plan.nodes):
        is_prefill = number < run.plan.prefills
        role = "prefill" if is_prefill else "decode"
        name = f"{role}_{number if is_prefill else number - run.plan.prefills}"
        values = {**worker_parameters(engine, is_prefill), "store_node": f"s{number}"}
        found[name] = with_parameters(template(role, values, templates), values)
    head = f"# {run.plan.name} of {engine.name}, as `mooncake plan` chose it.\n"
    return {model: head + text for model, text in found.items()}


def worker_parameters(engine: PlannedEngine, is_prefill: bool) -> dict[str, str]:
    settings, gpu = engine.settings(), engine.gpu()
    of_role = (
        {"chunk_tokens": settings.chunk_tokens} if is_prefill else {"slots": settings.decode_slots}
    )
    shapes = {"block_tokens": settings.block_tokens, "kv_bytes": gpu.pages_bytes, **of_role}
    return {**engine.parameters(), **{name: str(value) for name, value in shapes.items()}}


def conductor_parameters(config: ConductorConfig, shipped: Mapping[str, str]) -> dict[str, str]:
    """Parameters that differ from the default, and those where the shipped file does."""
    default = ConductorConfig()
    names = [field.name for field in dataclasses.fields(config)]
    return {
        name: _text(getattr(config, name))
        for name in names
        if name in shipped or getattr(config, name) != getattr(default, name)
    }


def serve_command(repository: Path, plan: FleetPlan, engine: PlannedEngine) -> str:
    nodes = ",".join(f"s{number}" for number in range(plan.nodes))
    return (
        f"mooncake serve --model-repository {shlex.quote(str(repository))} --nodes {nodes} "
        f"--store-bytes {store_bytes(plan, engine)}"
    )


def store_bytes(plan: FleetPlan, engine: PlannedEngine) -> int:
    """Bytes of each storage node for the simulated blocks."""
    block_bytes = engine.settings().block_tokens * engine.gpu().token_bytes
    return memory_bytes_for(plan.node_blocks, block_bytes, UNIT_BYTES)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
