"""Differences of a repository's parameters from the defaults and the shipped files. Pure.

Values are compared after parsing, so 1.0 equals 1, and true equals yes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from backends.config_pbtxt import convert
from backends.model_settings.model_file import ModelFile
from backends.model_settings.repository_check import classes_of, defaults_of


@dataclass(frozen=True, slots=True)
class ParameterDifference:
    model: str
    parameter: str
    value: str
    default: str | None  # None: this model has no such parameter
    shipped: str | None  # value in the shipped file; None: no shipped model has this backend

    def __str__(self) -> str:
        if self.default is None:
            return f"{self.model}.{self.parameter} = {self.value!r} (no such parameter is known)"
        notes = [f"default {self.default!r}"]
        if self.shipped is not None:
            is_shipped = self.value == self.shipped
            notes.append("as shipped" if is_shipped else f"shipped {self.shipped!r}")
        return f"{self.model}.{self.parameter} = {self.value!r} ({', '.join(notes)})"


def differences(
    files: list[ModelFile], shipped: Mapping[str, ModelFile]
) -> Iterator[ParameterDifference]:
    """The parameters of `files` whose value is not the default or not the shipped value.

    `shipped`: model -> shipped file. A model without a shipped file is compared with the first
    shipped model of its backend. Models without known parameters are skipped.
    """
    for file in files:
        kinds = {each.name: str(each.type) for cls in classes_of(file)[0] for each in fields(cls)}
        if not kinds:
            continue
        defaults = defaults_of(file)
        of_role = (each for each in shipped.values() if each.backend == file.backend)
        ours = shipped.get(file.model) or next(of_role, None)
        for parameter in [*kinds, *sorted(file.parameters.keys() - kinds.keys())]:
            default = defaults.get(parameter)
            kind = kinds.get(parameter, "str")
            value = file.parameters.get(parameter, default or "")
            sent = None if ours is None else ours.parameters.get(parameter, default or "")
            is_default = default is not None and read(kind, value) == read(kind, default)
            is_shipped = sent is None or read(kind, value) == read(kind, sent)
            if not (is_default and is_shipped):
                shown = value if is_shipped and sent is not None else sent
                yield ParameterDifference(file.model, parameter, value, default, shown)


def read(kind: str, text: str) -> object:
    """The value of the text for comparisons, or the text itself if it is not valid."""
    try:
        return convert(kind, text)
    except ValueError:
        return text
