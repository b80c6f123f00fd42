"""What options of `mooncake serve` say of all models: one checkpoint, its dtype and device, and how
many workers of each role there are.

They are to the model repository what `defaults` of a cluster file is to the models that a host is
rendered from: a value that an option says stands above that of every config.pbtxt, and everything
else is as the file says. The repository itself is only read, and the mirrors that the Tritons poll
are rendered from it, so live edits of the rest are carried over as ever. A worker without a folder
is made of the first one of its role, and gets the storage nodes in turns.

Not here: the mirrors (backends/launcher/repository.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.cluster.model_rendering import backend_named, parameters_of, with_parameters
from backends.errors import ConfigError
from backends.model_settings.model_file import WORKER_ROLES
from backends.model_settings.repository_files import by_number

OF_WORKERS = ("checkpoint", "dtype", "device")
SAID = "As options of `mooncake serve` say."


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Of one launch; "" and None: as the model repository says."""

    checkpoint: str = ""  # absolute, or "demo"
    dtype: str = ""
    device: str = ""
    workers: Mapping[str, int] = field(default_factory=dict)  # role -> how many

    @property
    def is_empty(self) -> bool:
        return not (self.parameters or self.workers)

    @property
    def parameters(self) -> dict[str, str]:
        """Those that options say, by name."""
        said = {name: str(getattr(self, name)) for name in OF_WORKERS}
        return {name: value for name, value in said.items() if value}

    def of_model(self, text: str) -> dict[str, str]:
        """Parameters of the model with this config.pbtxt that options say."""
        if backend_named(text) in WORKER_ROLES:
            return self.parameters
        if self.checkpoint and "checkpoint" in parameters_of(text):
            return {"checkpoint": self.checkpoint}
        return {}


NO_SETTINGS = ServeSettings()


@dataclass(frozen=True, slots=True)
class ServedWorkers:
    """Which workers a launch has, of those that have a folder and of those that are made."""

    left_out: frozenset[str] = frozenset()  # folders beyond the number that was asked for
    made: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # name -> role, its number

    def source_of(self, model: str, backends: Mapping[str, str]) -> str:
        """The folder that a made worker is rendered from now; "" when there is none any more.
        `backends`: of the folders that there are. One that has a folder by now is no made one."""
        if model in backends:
            return model
        role, _ = self.made[model]
        return _first_of(role, backends, self.left_out)


def served_workers(settings: ServeSettings, backends: Mapping[str, str]) -> ServedWorkers:
    """At the start; `backends` of the folders that there are. ConfigError where a role has none."""
    left_out: set[str] = set()
    made: dict[str, tuple[str, int]] = {}
    for role, count in settings.workers.items():
        there = [model for model in sorted(backends, key=by_number) if backends[model] == role]
        if not there:
            raise ConfigError(
                f"--{role} {count}: the model repository has no {role} worker to make others from"
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
    """The config.pbtxt that Triton sees; `made_number`: of a worker that has no folder."""
    parameters = settings.of_model(text)
    if made_number is not None and nodes:
        parameters["store_node"] = nodes[made_number % len(nodes)]
    if not parameters:
        return text
    return with_parameters(text, parameters, SAID)


def made_problems(texts: Mapping[str, str], made: Mapping[str, str]) -> list[str]:
    """Why workers cannot be made of those that they would be; `made`: name -> source."""
    found = []
    for model, source in made.items():
        own = parameters_of(texts[source])
        if own.get("pipeline_group"):
            found.append(
                f"{model}: would be made of {source}, a stage of a pipeline group; copy "
                "the folders of the whole group instead"
            )
        if own.get("engine") == "tensorrt_llm":
            found.append(
                f"{model}: would be made of {source}, whose engine has GPUs of its own; "
                "copy its folder and set the parameter gpus there"
            )
    return found


def _first_of(role: str, backends: Mapping[str, str], left_out: frozenset[str]) -> str:
    there = [model for model in backends if backends[model] == role and model not in left_out]
    return min(there, key=by_number, default="")
