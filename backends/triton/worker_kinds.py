"""Reads the parameters of a prefill or decode worker, and makes the worker.

A *driver* connects a worker to its engine. A *flipping* worker can change its role. Not here: the
meaning of the parameters (backends/config_pbtxt.py, settings.py of an engine), Triton's API.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    classes = (own, other) if raw.get("roles", "") == "both" else (own,)
    if of_engine := ENGINE_CONFIGS.get(raw.get("engine", "")):
        return (*classes, of_engine), page_problems
    return classes, lambda *configs: ()


def read_worker_configs(role: str, model: str, raw: Mapping[str, str], count: int) -> list[Any]:
    """The role's config. The other role's config follows if `roles` is both, and the engine's own
    config if it has one."""
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
    role: str, model: str, repository: str, config: Any, of_other_role: Any, *of_engine: Any
) -> FlippingWorker:
    """Make a worker that starts with `role`. Measures each role that has no machine profile."""
    from backends.workers import machine_profile
    from backends.workers.decode_worker import DecodeWorker
    from backends.workers.lasting_parts import LastingParts
    from backends.workers.prefill_worker import PrefillWorker
    from backends.workers.roles.flipping_worker import ActiveWorker, FlippingWorker

    configs = {role: config, OTHER_ROLE[role]: of_other_role}
    engine, drivers = _drivers(model, repository, configs, role, of_engine)
    try:
        state = Path(os.environ["MOONCAKE_STATE"])
        for each, driver in drivers.items():
            machine_profile.load_or_measure(driver(), each, config.threads, state)

        def prefill(parts: LastingParts) -> ActiveWorker:
            return PrefillWorker(model, configs["prefill"], repository, drivers["prefill"](), parts)

        def decode(parts: LastingParts) -> ActiveWorker:
            return DecodeWorker(model, configs["decode"], repository, drivers["decode"](), parts)

        parts = LastingParts(config, repository, drivers[role](), can_flip=True)
        makers = {"prefill": prefill, "decode": decode}
        return FlippingWorker(role, parts, makers, engine.close)
    except BaseException:
        engine.close()
        raise


def _drivers(
    model: str, repository: str, configs: Mapping[str, Any], role: str, of_engine: Sequence[Any]
) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """(an engine for both roles, role -> function that makes its driver)"""
    if configs[role].engine in ENGINE_CONFIGS:
        from backends.workers.connected import engines

        in_order = [configs[role], configs[OTHER_ROLE[role]]]
        use = engines.load_engine(model, in_order, repository, *of_engine)
        return use.engine, {
            each: functools.partial(engines.driver_of, config, use)
            for each, config in configs.items()
        }
    from backends.workers.step_driver import StepDecode, StepPrefill, load_engine

    engine = load_engine(configs[role], repository)
    return engine, {
        "prefill": functools.partial(StepPrefill, engine),
        "decode": functools.partial(StepDecode, engine),
    }
