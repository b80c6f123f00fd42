"""Reads the parameters of a prefill or decode worker, and makes the worker.

A *driver* connects a worker to its engine. A *flipping* worker can change its role. Not here: the
meaning of the parameters (backends/config_pbtxt.py, settings.py of an engine), Triton's API.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.config_pbtxt import DecodeConfig, PrefillConfig, read_configs
from backends.engine.connected.settings import page_problems
from backends.engine.trtllm.settings import TrtllmConfig
from backends.engine.vllm.settings import VllmConfig

CONFIGS: Mapping[str, Any] = {"prefill": PrefillConfig, "decode": DecodeConfig}
# Engine -> class of the parameters that only it has.
ENGINE_CONFIGS: Mapping[str, Any] = {"tensorrt_llm": TrtllmConfig, "vllm": VllmConfig}
OTHER_ROLE: Mapping[str, str] = {"prefill": "decode", "decode": "prefill"}

# Functions import these modules later: Triton retries a model with a wrong config.pbtxt every
# second, so the configs are read before the imports, which take long.
if TYPE_CHECKING:
    from backends.workers.decode_worker import DecodeWorker
    from backends.workers.pipeline.later_stage import StageWorker
    from backends.workers.prefill_worker import PrefillWorker
    from backends.workers.roles.flipping_worker import FlippingWorker


def config_classes(
    role: str, raw: Mapping[str, str]
) -> tuple[tuple[type[Any], ...], Callable[..., Iterable[str]]]:
    """(config classes for the parameters `raw`, function that finds conflicts of the configs)."""
    own, other = CONFIGS[role], CONFIGS[OTHER_ROLE[role]]
    if of_engine := ENGINE_CONFIGS.get(raw.get("engine", "")):
        return (own, of_engine), page_problems
    classes = (own, other) if raw.get("roles", "") == "both" else (own,)
    return classes, lambda *configs: ()


def read_worker_configs(role: str, model: str, raw: Mapping[str, str], count: int) -> list[Any]:
    """The role's config. The engine's own config follows if it has one, and the other role's config
    if `roles` is both."""
    classes, together = config_classes(role, raw)
    return read_configs(classes, model, raw, count, together)


def make_driver(role: str, model: str, repository: str, config: Any, *of_engine: Any) -> Any:
    """Load an engine and return its driver. `of_engine`: its own config, if it has one."""
    if config.engine in ENGINE_CONFIGS:
        from backends.workers.connected import engines

        return engines.make_driver(model, config, repository, *of_engine)
    from backends.workers.step_driver import StepDecode, StepPrefill, load_engine

    engine = load_engine(config, repository)
    if config.pipeline_stages > 1:
        from backends.workers.pipeline.first_stage import PipelinePrefill
        from backends.workers.pipeline.stage_prefill import StagePrefill

        return (StagePrefill if config.pipeline_stage else PipelinePrefill)(engine, config)
    return (StepPrefill if role == "prefill" else StepDecode)(engine)


def make_worker(
    role: str, model: str, repository: str, config: Any, *more: Any
) -> PrefillWorker | StageWorker | DecodeWorker:
    """Makes a worker with one role. `more`: the engine's own config, if it has one."""
    from backends.workers.decode_worker import DecodeWorker
    from backends.workers.prefill_worker import PrefillWorker

    driver = make_driver(role, model, repository, config, *more)
    try:
        worker = PrefillWorker if role == "prefill" else DecodeWorker
        if config.pipeline_stage:
            from backends.workers.pipeline.later_stage import StageWorker

            return StageWorker(model, config, repository, driver)
        return worker(model, config, repository, driver)
    except BaseException:
        driver.close()
        raise


def make_flipping_worker(
    role: str, model: str, repository: str, config: Any, of_other_role: Any
) -> FlippingWorker:
    """Make a worker that starts with `role`. Measures each role that has no machine profile."""
    from backends.workers import machine_profile
    from backends.workers.decode_worker import DecodeWorker
    from backends.workers.lasting_parts import LastingParts
    from backends.workers.prefill_worker import PrefillWorker
    from backends.workers.roles.flipping_worker import ActiveWorker, FlippingWorker
    from backends.workers.step_driver import StepDecode, StepPrefill, load_engine

    configs = {role: config, OTHER_ROLE[role]: of_other_role}
    engine = load_engine(config, repository)
    state = Path(os.environ["MOONCAKE_STATE"])
    machine_profile.load_or_measure(StepPrefill(engine), "prefill", config.threads, state)
    machine_profile.load_or_measure(StepDecode(engine), "decode", config.threads, state)

    def prefill(parts: LastingParts) -> ActiveWorker:
        driver = StepPrefill(engine)
        return PrefillWorker(model, configs["prefill"], repository, driver, parts)

    def decode(parts: LastingParts) -> ActiveWorker:
        return DecodeWorker(model, configs["decode"], repository, StepDecode(engine), parts)

    parts = LastingParts(config, repository, StepPrefill(engine), can_flip=True)
    makers = {"prefill": prefill, "decode": decode}
    return FlippingWorker(role, parts, makers, engine.close)
