"""Reads one config.pbtxt as Triton does, and changes values in its text.

The text is parsed into Triton's own protobuf message (ModelConfig), so this module and Triton
accept the same files. A change replaces only the value's characters, so comments and layout are
kept. The new text is parsed again, and rejected if anything except the value has changed.

Not here: whether values are right (repository_check.py), access to files (repository_files.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from backends.cluster.model_rendering import BYTES, CONFIG, ROLES, parameters_of, with_parameters
from backends.errors import ConfigError

TAKE_ANOTHER = "take one of the same kind as a model"
COMMENT = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\#[^\n]*""", re.VERBOSE
)
SHOWN_MAX = 200  # an error quotes at most this number of characters of the parser's message
NOT_UTF_8 = re.compile("[\udc80-\udcff]")  # characters in place of invalid bytes
SET_BY_COMMAND = "Set by `mooncake config set`."


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The settings of a config.pbtxt that this project uses."""

    model: str  # name of the model's folder
    text: str
    name: str  # name in the file; "": no name, so Triton uses the folder's name
    backend: str  # field `backend`, or else field `platform`
    parameters: Mapping[str, str]  # without the launcher's parameters, whose names begin with _
    instances: int  # sum over all instance groups, >= 1
    steps: tuple[str, ...]  # models that an ensemble calls; () for other models
    inputs: Mapping[str, str]  # tensor -> Triton's name of its type, without TYPE_
    outputs: Mapping[str, str]  # tensor -> Triton's name of its type, without TYPE_

    @property
    def is_worker(self) -> bool:
        return self.backend in ROLES

    def value(self, parameter: str, default: object = "") -> str:
        return self.parameters.get(parameter, str(default))


def read_model_file(model: str, text: str) -> ModelFile:
    """Parse a config.pbtxt. Raises ConfigError with line and column if it is invalid."""
    config = _parsed(model, text)
    return ModelFile(
        model=model,
        text=text,
        name=config.name,
        backend=config.backend or config.platform,
        parameters={
            name: value.string_value
            for name, value in sorted(config.parameters.items())
            if not name.startswith("_")
        },
        instances=sum(group.count or 1 for group in config.instance_group) or 1,
        steps=tuple(step.model_name for step in config.ensemble_scheduling.step),
        inputs=_types(config.input),
        outputs=_types(config.output),
    )


@lru_cache(maxsize=128)
def reading_problem(model: str, raw: bytes) -> str:
    """Why Triton cannot read this config.pbtxt, with line and remedy; "" if Triton can."""
    text = raw.decode("utf-8", BYTES)
    try:
        _parsed(model, text)
    except ConfigError as error:
        return str(error)
    return "" if without_comments(text) else f"{model}/{CONFIG} is empty, line 1: {TAKE_ANOTHER}"


def without_comments(text: str) -> str:
    """The text without comments and with single spaces. Triton reloads a model only if this form
    of the model's config.pbtxt changes."""
    return " ".join(COMMENT.sub(r"\g<string>", text).split())


def changed(file: ModelFile, parameters: Mapping[str, str]) -> str:
    """The file's text with these values. Raises ConfigError if it must be edited by hand."""
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
        f"{model}/config.pbtxt has {parameter} in a form that cannot be changed without changing "
        "other parts; edit the file, or write the parameter as "
        'parameters { key: "..." value { string_value: "..." } } on a line of its own'
    )


def _parsed(model: str, text: str) -> Any:
    if problem := _encoding_problem(text):
        raise ConfigError(f"{model}/{CONFIG} is no model configuration: {problem}")
    readable = text.encode("utf-8", BYTES).decode("utf-8", "replace")  # for bad bytes in comments
    try:
        return text_format.Parse(readable, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        line, _, rest = str(error).partition(":")
        column, _, what = rest.partition(" : ")
        where = f"line {line}, column {column}: " if what else ""
        what = what if len(what) <= SHOWN_MAX else f"... {what[-SHOWN_MAX:]}"
        raise ConfigError(
            f"{model}/{CONFIG} is no model configuration: {where}{what or error} (correct that "
            "line; if it is the last line, the file may be cut off)"
        ) from None


def _encoding_problem(text: str) -> str:
    if text.startswith("\ufeff"):
        return "line 1: begins with a byte order mark (BOM); save the file as UTF-8 without BOM"
    if text.startswith(("\udcff\udcfe", "\udcfe\udcff")):
        return "line 1: begins like UTF-16; save it as UTF-8"
    read = COMMENT.sub(r"\g<string>", text)
    if found := NOT_UTF_8.search(read):
        line = read.count("\n", 0, found.start()) + 1
        return f"line {line}: has a byte that is not UTF-8; save the file as UTF-8"
    return ""


def _types(tensors: Any) -> dict[str, str]:
    names = model_config_pb2.DataType
    return {tensor.name: names.Name(tensor.data_type).removeprefix("TYPE_") for tensor in tensors}
