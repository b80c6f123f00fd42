"""Plans the edit of `mooncake config set`, or reports all reasons to refuse it. Pure.

An edit is refused if it adds a mistake to the repository, if an edited model has any mistake, or if
the running system cannot apply a change.

Not here: files (repository_files.py), waiting for the running system (running_system.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from backends.cluster.cluster_file import FINGERPRINT
from backends.cluster.section import did_you_mean
from backends.config_pbtxt import ENGINES
from backends.errors import ConfigError
from backends.model_settings.model_file import changed, read_model_file
from backends.model_settings.repository_check import LookUp, check_repository, defaults_of
from backends.model_settings.running_system import RunningSettings

FORM = "MODEL.PARAMETER=VALUE, like conductor.admission=early or 'prefill_*.chunk_tokens=256'"
PATTERN = "*?["  # a model name with one of these characters is a pattern
# With one of these settings, a worker has further parameters, which the same edit may set.
ADDING_MOST: tuple[Mapping[str, str], ...] = (
    *({"engine": engine} for engine in ENGINES),
    {"roles": "both"},
)
ADDING = tuple({f".{name}" for more in ADDING_MOST for name in more})


class EditRefused(Exception):
    """The edit is refused; `problems` lists all reasons."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True, slots=True)
class ValueChange:
    model: str
    parameter: str
    before: str | None  # None: the parameter was not in the file
    default: str
    after: str

    def __str__(self) -> str:
        before = f"{self.default!r} (the default)" if self.before is None else repr(self.before)
        return f"{self.model}.{self.parameter}: {before} -> {self.after!r}"


@dataclass(frozen=True, slots=True)
class SettingsEdit:
    changes: tuple[ValueChange, ...]
    texts: Mapping[str, str]  # changed model -> new content of its config.pbtxt


def plan_edit(
    texts: Mapping[str, str],
    assignments: Sequence[str],
    checkpoint: LookUp,
    running: RunningSettings | None = None,
) -> SettingsEdit:
    """Raises EditRefused. `running`: the running system that serves `texts`, or None."""
    problems: list[str] = []
    wanted: dict[str, dict[str, str]] = {}
    # Assignments that give workers further parameters (ADDING) come first, because a pattern
    # matches only models that have the assigned parameter.
    ordered = sorted(assignments, key=lambda each: not each.split("=")[0].strip().endswith(ADDING))
    for assignment in ordered:
        try:
            for model, parameter, value in _assigned(assignment, texts, wanted, running):
                before = wanted.setdefault(model, {}).setdefault(parameter, value)
                if before != value:
                    problems.append(f"{model}.{parameter} is set twice: {before!r} and {value!r}")
        except ConfigError as error:
            problems.append(str(error))
    changes: list[ValueChange] = []
    new_texts: dict[str, str] = {}
    for model, values in wanted.items():
        try:
            file = read_model_file(model, texts[model])
            defaults, old = defaults_of(file), file.parameters
            own = [
                ValueChange(model, name, old.get(name), defaults.get(name, ""), value)
                for name, value in values.items()
                if old.get(name) != value
            ]
            changes += own
            if own:
                new_texts[model] = changed(file, {each.parameter: each.after for each in own})
        except ConfigError as error:
            problems.append(str(error))
    problems += _new_mistakes(texts, {**texts, **new_texts}, wanted, checkpoint, running)
    if running is not None:
        problems += not_live(changes, running)
    if problems:
        raise EditRefused(problems)
    return SettingsEdit(tuple(changes), new_texts)


def not_live(changes: Iterable[ValueChange], running: RunningSettings) -> Iterator[str]:
    """Why the running system cannot apply some of the changes, each with a remedy."""
    for change in changes:
        name = f"{change.model}.{change.parameter}"
        if change.parameter in running.options:
            yield (
                f"{name}: --{change.parameter} of the running `mooncake serve` overrides the file; "
                "restart `mooncake serve` without this option, or with another value"
            )
        elif change.parameter in FINGERPRINT:
            yield (
                f"{name} cannot be changed while it serves, because a worker cannot read KV of "
                f"another {change.parameter}. Stop `mooncake serve`, set the parameter in all "
                f"models ('*.{change.parameter}=...'), and start `mooncake serve` again"
            )


def _assigned(
    assignment: str,
    texts: Mapping[str, str],
    wanted: Mapping[str, Mapping[str, str]],
    running: RunningSettings | None,
) -> Iterator[tuple[str, str, str]]:
    """(model, parameter, value) for each model that the assignment matches. `wanted`: the earlier
    assignments, by model. Raises ConfigError if no model or parameter matches."""
    left, equals, value = assignment.partition("=")
    pattern, _, parameter = left.strip().rpartition(".")
    if not (equals and pattern and parameter):
        raise ConfigError(f"{assignment!r}: write {FORM}")
    models = [model for model in texts if fnmatchcase(model, pattern)]
    made = running.made.get(pattern) if running is not None else None
    if not models:
        if made:
            raise ConfigError(
                f"{pattern} has no folder and is made from {made}: change {made}, or first make a "
                f"folder for it (cp -r {made} {pattern})"
            )
        raise ConfigError(f"there is no model {pattern!r}{did_you_mean(pattern, set(texts))}")
    if any(character in pattern for character in PATTERN):
        models = [
            model
            for model in models
            if parameter in _known(model, texts[model], (wanted.get(model, {}),))
        ]
        if not models:
            raise ConfigError(f"no model that matches {pattern!r} has a parameter {parameter!r}")
    for model in models:
        known = _known(model, texts[model])
        if known and parameter not in known:
            hint = did_you_mean(parameter, known)
            raise ConfigError(f"{model} has no parameter {parameter!r}{hint}")
        if not known:
            raise ConfigError(f"{model} has no known parameters: edit its config.pbtxt")
        yield model, parameter, value


def _known(model: str, text: str, settings: Iterable[Mapping[str, str]] = ADDING_MOST) -> set[str]:
    """Names of the parameters that the model has, or would have with one of `settings`. Empty if
    the file is invalid or the backend has no known parameters."""
    try:
        file = read_model_file(model, text)
    except ConfigError:
        return set()
    names = set(defaults_of(file))
    if file.is_worker:
        for more in settings:
            names |= defaults_of(replace(file, parameters={**file.parameters, **more})).keys()
    return names


def _new_mistakes(
    before: Mapping[str, str],
    after: Mapping[str, str],
    touched: Iterable[str],
    checkpoint: LookUp,
    running: RunningSettings | None,
) -> list[str]:
    nodes = running.nodes if running is not None and running.nodes else None
    known = set(check_repository(before, checkpoint, nodes).mistakes)
    own = tuple(f"{model}{mark}" for model in touched for mark in (":", "/config.pbtxt"))
    return [
        mistake
        for mistake in check_repository(after, checkpoint, nodes).mistakes
        if mistake not in known or mistake.startswith(own)
    ]
