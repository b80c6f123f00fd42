"""Makes the worker of a role with the driver of its engine; which parameters it may have.

Not here: the parameters themselves (backends/config_pbtxt.py, engine/trtllm/settings.py), Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from backends.config_pbtxt import DecodeConfig, PrefillConfig, read_configs
from backends.engine.trtllm import settings as trtllm_settings

if TYPE_CHECKING:  # Triton tries a wrong config.pbtxt again every second: import late
    from backends.workers.decode_worker import DecodeWorker
    from backends.workers.pipeline.later_stage import StageWorker
    from backends.workers.prefill_worker import PrefillWorker


def config_classes(
    role: str, engine: str
) -> tuple[tuple[type[Any], ...], Callable[..., Iterable[str]]]:
    """What a worker's parameters are read into, and what is wrong with them side by side."""
    config_class: Any = PrefillConfig if role == "prefill" else DecodeConfig
    if engine != "tensorrt_llm":
        return (config_class,), lambda *configs: ()
    return (config_class, trtllm_settings.TrtllmConfig), trtllm_settings.problems_together


def read_worker_configs(role: str, model: str, raw: Mapping[str, str], count: int) -> list[Any]:
    """The worker's config, and that of its engine where it has one of its own."""
    classes, together = config_classes(role, raw.get("engine", ""))
    return read_configs(classes, model, raw, count, together)


def make_driver(role: str, model: str, repository: str, config: Any, *of_engine: Any) -> Any:
    """Imports here: a worker loads what its own engine needs and nothing else."""
    if config.engine == "tensorrt_llm":
        from backends.workers.trtllm.decode import TrtllmDecode
        from backends.workers.trtllm.prefill import TrtllmPrefill

        kind = TrtllmPrefill if role == "prefill" else TrtllmDecode
        return kind(model, config, repository, *of_engine)
    if config.pipeline_stages > 1:
        from backends.workers.pipeline.first_stage import PipelinePrefill
        from backends.workers.pipeline.stage_prefill import StagePrefill, load_stage

        of_stage = StagePrefill if config.pipeline_stage else PipelinePrefill
        return of_stage(load_stage(config, repository), config)
    from backends.workers.step_driver import StepDecode, StepPrefill, load_engine

    return (StepPrefill if role == "prefill" else StepDecode)(load_engine(config, repository))


def make_worker(
    role: str, model: str, repository: str, config: Any, *of_engine: Any
) -> PrefillWorker | StageWorker | DecodeWorker:
    from backends.workers.decode_worker import DecodeWorker
    from backends.workers.prefill_worker import PrefillWorker

    driver = make_driver(role, model, repository, config, *of_engine)
    try:
        worker = PrefillWorker if role == "prefill" else DecodeWorker
        if config.pipeline_stage:
            from backends.workers.pipeline.later_stage import StageWorker

            return StageWorker(model, config, repository, driver)
        return worker(model, config, repository, driver)
    except BaseException:
        driver.close()
        raise
