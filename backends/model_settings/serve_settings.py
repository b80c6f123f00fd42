"""Options of `mooncake serve` for all models: checkpoint, engine, dtype, device, worker numbers.

An option overrides its parameter in every config.pbtxt. The launcher does not write to the model
repository. It writes *mirrors*, copies that the Tritons poll, and applies the options there. Edits
of other parameters in the repository take effect as usual. If a role has fewer folders than wanted
workers, further workers are *made* from the first served folder of the role. Made workers use the
storage nodes in turn.

Not here: writing the mirrors (backends/launcher/repository.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.cluster.host_plan import needs_own_gpus
from backends.cluster.model_rendering import ROLES, backend_named, parameters_of, with_parameters
from backends.errors import ConfigError
from backends.model_settings.repository_files import by_number

OF_WORKERS = ("checkpoint", "engine", "dtype", "device")
COMMENT = "Set by options of `mooncake serve`."


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The options of one launch. "": the option is not given, so the files' values count."""

    checkpoint: str = ""  # an absolute path, or "demo"
    dtype: str = ""
    device: str = ""
    workers: Mapping[str, int] = field(default_factory=dict)  # role -> number of workers
    engine: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.parameters or self.workers)

    @property
    def parameters(self) -> dict[str, str]:
        """Parameter -> value, of the given options."""
        given = {name: str(getattr(self, name)) for name in OF_WORKERS}
        return {name: value for name, value in given.items() if value}

    def of_model(self, text: str) -> dict[str, str]:
        """The given options that apply to the model with this config.pbtxt."""
        if backend_named(text) in ROLES:
            return self.parameters
        if self.checkpoint and "checkpoint" in parameters_of(text):
            return {"checkpoint": self.checkpoint}
        return {}


NO_SETTINGS = ServeSettings()


@dataclass(frozen=True, slots=True)
class ServedWorkers:
    """The difference between the workers of a launch and the worker folders of its repository."""

    left_out: frozenset[str] = frozenset()  # folders above the wanted number, which are not served
    # Made worker -> (role, the worker's number among the workers of this role, from 0).
    made: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def source_of(self, model: str, backends: Mapping[str, str]) -> str:
        """The worker's own folder if it has one; or else the first served folder of its role, from
        which it is made. "" without a folder. `backends`: existing folder -> its backend."""
        if model in backends:
            return model
        role, _ = self.made[model]
        served = [name for name in backends if backends[name] == role and name not in self.left_out]
        return min(served, key=by_number, default="")


def served_workers(settings: ServeSettings, backends: Mapping[str, str]) -> ServedWorkers:
    """The workers at the start. `backends`: existing folder -> its backend. Raises ConfigError if
    an option sets the number of workers of a role that has no folder."""
    left_out: set[str] = set()
    made: dict[str, tuple[str, int]] = {}
    for role, count in settings.workers.items():
        there = [model for model in sorted(backends, key=by_number) if backends[model] == role]
        if not there:
            raise ConfigError(
                f"--{role} {count}: the model repository has no {role} worker; add a folder for one"
            )
        left_out.update(there[count:])
        free = (
            name
            for number in range(count + len(backends))
            if (name := f"{role}_{number}") not in backends
        )
        made |= {next(free): (role, number) for number in range(len(there), count)}
    return ServedWorkers(frozenset(left_out), made)


def rendered(
    settings: ServeSettings, text: str, made_number: int | None, nodes: Sequence[str]
) -> str:
    """The config.pbtxt for the mirror. `made_number`: number of a made worker; None: not made."""
    parameters = settings.of_model(text)
    if made_number is not None and nodes:
        parameters["store_node"] = nodes[made_number % len(nodes)]
    if not parameters:
        return text
    return with_parameters(text, parameters, COMMENT)


def made_problems(texts: Mapping[str, str], made: Mapping[str, str]) -> list[str]:
    """Why workers cannot be made. `texts`: worker -> its config.pbtxt for the mirror. `made`:
    worker without a folder -> folder it is made from."""
    found = []
    for model, source in made.items():
        own = parameters_of(texts[model])
        if own.get("pipeline_group"):
            found.append(
                f"{model}: would be made from {source}, a stage of a pipeline group; copy "
                "the folders of the whole group instead"
            )
        if needs_own_gpus(own):
            found.append(
                f"{model}: would be made from {source}, whose engine needs GPUs of its own; "
                "copy its folder and set the parameter gpus there"
            )
    return found
