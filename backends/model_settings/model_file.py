"""One config.pbtxt: what Triton reads in it, and the same text with other values.

Triton's own message (ModelConfig) reads it, so what is legal there is legal here. A value is
changed in the text, so that comments and layout stay, and the result is read again: a text in which
anything else has changed is not given out.

Not here: whether values are right (repository_check.py), files (repository_files.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from backends.cluster.model_rendering import BYTES, CONFIG, parameters_of, with_parameters
from backends.errors import ConfigError

WORKER_ROLES = ("prefill", "decode")
TYPE = "TYPE_"  # before the name of each type of tensor
TAKE_ANOTHER = "take one of the same kind as a model"
COMMENT = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\#[^\n]*""", re.VERBOSE
)
SHOWN_MAX = 200  # characters of the parser's own message
NOT_UTF_8 = re.compile("[\udc80-\udcff]")  # as BYTES decodes them
SET_BY_COMMAND = "Set by `mooncake config set`."


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a config.pbtxt says, as far as this project reads it."""

    model: str  # its folder's name
    text: str
    name: str  # the name in the file; "": the folder's
    backend: str  # or its platform
    parameters: Mapping[str, str]
    instances: int
    steps: tuple[str, ...]  # models of an ensemble
    inputs: Mapping[str, str]  # name -> type
    outputs: Mapping[str, str]

    @property
    def is_worker(self) -> bool:
        return self.backend in WORKER_ROLES

    def value(self, parameter: str, default: object = "") -> str:
        return self.parameters.get(parameter, str(default))


def read_model_file(model: str, text: str) -> ModelFile:
    """ConfigError, with line and column, when it is no config.pbtxt."""
    config = _parsed(model, text)
    steps = tuple(step.model_name for step in config.ensemble_scheduling.step)
    return ModelFile(
        model=model,
        text=text,
        name=config.name,
        backend=config.backend or config.platform,
        parameters=_parameters(config),
        instances=sum(group.count or 1 for group in config.instance_group) or 1,
        steps=steps,
        inputs=_types(config.input),
        outputs=_types(config.output),
    )


@lru_cache(maxsize=128)
def reading_problem(model: str, raw: bytes) -> str:
    """Why Triton could not read this config.pbtxt, with line and remedy; "" when it can."""
    text = raw.decode("utf-8", BYTES)
    try:
        _parsed(model, text)
    except ConfigError as error:
        return str(error)
    return "" if without_comments(text) else f"{model}/{CONFIG} is empty, line 1: {TAKE_ANOTHER}"


def without_comments(text: str) -> str:
    """What Triton compares before it loads a model anew, and so not the blank space either."""
    return " ".join(COMMENT.sub(_without_comment, text).split())


def changed(file: ModelFile, parameters: Mapping[str, str]) -> str:
    """The same text with these values; ConfigError where only a person can make the change."""
    hidden = sorted((file.parameters.keys() & parameters.keys()) - parameters_of(file.text).keys())
    if hidden:
        raise ConfigError(_by_hand(file.model, hidden[0]))
    text = with_parameters(file.text, parameters, SET_BY_COMMAND)
    wanted, found = _parsed(file.model, file.text), _parsed(file.model, text)
    for name, value in parameters.items():
        wanted.parameters[name].string_value = value
    if wanted != found:
        raise ConfigError(_by_hand(file.model, ", ".join(sorted(parameters))))
    return text


def _by_hand(model: str, parameter: str) -> str:
    return (
        f"{model}/config.pbtxt writes {parameter} in a way that cannot be changed without touching "
        "the rest; edit the file, or write the parameter as "
        'parameters { key: "..." value { string_value: "..." } } on a line of its own'
    )


def _parsed(model: str, text: str) -> Any:
    if problem := _encoding_problem(text):
        raise ConfigError(f"{model}/{CONFIG} is no model configuration: {problem}")
    readable = text.encode("utf-8", BYTES).decode("utf-8", "replace")  # a comment may be anything
    try:
        return text_format.Parse(readable, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        line, _, rest = str(error).partition(":")
        column, _, what = rest.partition(" : ")
        where = f"line {line}, column {column}: " if what else ""
        what = what if len(what) <= SHOWN_MAX else f"... {what[-SHOWN_MAX:]}"  # it has the line
        raise ConfigError(
            f"{model}/{CONFIG} is no model configuration: {where}{what or error} (correct that "
            "line; a file that was cut off ends there)"
        ) from None


def _encoding_problem(text: str) -> str:
    if text.startswith("\ufeff"):
        return "line 1: begins with a byte order mark; save it as UTF-8 without one (no BOM)"
    if text.startswith(("\udcff\udcfe", "\udcfe\udcff")):
        return "line 1: begins as UTF-16 does; save it as UTF-8"
    read = COMMENT.sub(_without_comment, text)
    if found := NOT_UTF_8.search(read):
        line = read.count("\n", 0, found.start()) + 1
        return f"line {line}: has a byte that is not UTF-8; save the file as UTF-8"
    return ""


def _without_comment(match: re.Match[str]) -> str:
    return match["string"] or ""


def _parameters(config: Any) -> dict[str, str]:
    """Names with a leading underscore are the launcher's own."""
    return {
        name: value.string_value
        for name, value in sorted(config.parameters.items())
        if not name.startswith("_")
    }


def _types(tensors: Any) -> dict[str, str]:
    names = model_config_pb2.DataType
    return {tensor.name: names.Name(tensor.data_type).removeprefix(TYPE) for tensor in tensors}
