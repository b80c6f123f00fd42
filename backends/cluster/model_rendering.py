"""Renders the config.pbtxt files of one host from templates and the deployment's parameters.

A template is the config.pbtxt of a model in the base repository. Its comments and tensors are kept.
The deployment's values replace those of the template, and parameters that the template lacks are
appended. Relative paths in the cluster file start at the folder of that file. Relative paths in a
rendered model start at the parent of the repository, so they get the prefix `BACK`.

Not here: writing the files, and later edits by an operator (rendered_folder.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import HostPlan, gpus_of
from backends.shipped import named_or_shipped

CONFIG = "config.pbtxt"
BYTES = "surrogateescape"  # error handler that preserves bytes that are not UTF-8
BACK = "../../"  # from rendered/HOST, the repository's parent, to the folder of the cluster file
OPTION_FILES = ("llm_options", "vllm_options")  # parameters that are a path, or JSON
BACKEND = re.compile(r'^\s*(?:backend|platform)\s*:\s*"([^"]*)"', re.MULTILINE)
PARAMETER = re.compile(
    r'(?P<before>^\s*parameters\s*:?\s*\{\s*key\s*:\s*"(?P<key>[^"]+)"\s*,?\s*value\s*:?\s*\{'
    r'\s*string_value\s*:\s*")'
    r'(?P<value>(?:[^"\\]|\\.)*)(?P<after>"\s*\}\s*\})',
    re.MULTILINE,
)
ROLES = ("prefill", "decode")
ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class TemplateMissing(Exception):
    """The base model repository is missing, or has no template for a worker."""


def templates_in(base: Path) -> dict[str, str]:
    """Model -> text of its config.pbtxt, for all models of the repository `base`."""
    base = named_or_shipped(base)
    if not base.is_dir():
        raise TemplateMissing(
            f"there is no model repository at {base} to render from: run from the project's root, "
            "name one with --model-repository, or omit the option for the shipped one"
        )
    return {
        path.parent.name: path.read_text("utf-8", BYTES)
        for path in sorted(base.glob(f"*/{CONFIG}"))
    }


def rendered_models(
    deployment: Deployment, plan: HostPlan, templates: Mapping[str, str]
) -> dict[str, str]:
    """Model -> text of its config.pbtxt, for all models of the host. Raises TemplateMissing."""
    head = f"# Rendered from {deployment.file_name}; an edit here is kept until "
    head += "`mooncake cluster render models`.\n"
    found: dict[str, str] = {}
    if plan.frontend is not None:
        for model, text in templates.items():
            if backend_named(text) not in ROLES:
                found[model] = head + with_parameters(text, _of_public(deployment, model, text))
    of_workers = {
        worker.model: template(worker.role, worker.parameters, templates) for worker in plan.workers
    }
    gpus = gpus_of(
        {
            worker.model: {
                **parameters_of(of_workers[worker.model]),
                "gpus": "",
                **worker.parameters,
            }
            for worker in plan.workers
        }
    )
    for worker in plan.workers:
        parameters = {**worker.parameters, "store_node": worker.store_node}
        parameters.setdefault("checkpoint", deployment.checkpoint)
        if worker.model in gpus:
            parameters["gpus"] = gpus[worker.model]
        found[worker.model] = head + with_parameters(
            of_workers[worker.model], _led_back(parameters)
        )
    return found


def backend_named(text: str) -> str:
    found = BACKEND.search(text)
    return found[1] if found else ""


def parameters_of(text: str) -> dict[str, str]:
    """The parameters of a config.pbtxt, if they are written as in the shipped models."""
    return {match["key"]: _unescaped(match["value"]) for match in PARAMETER.finditer(text)}


def with_parameters(
    text: str, parameters: Mapping[str, str], comment: str = "From the cluster file."
) -> str:
    """The config.pbtxt `text` with these values. Parameters that `text` lacks are appended after
    `comment`."""

    def replaced(match: re.Match[str]) -> str:
        value = parameters.get(match["key"])
        if value is None:
            return match[0]
        return match["before"] + _escaped(value) + match["after"]

    text = PARAMETER.sub(replaced, text)
    more = [name for name in parameters if name not in parameters_of(text)]
    if more:
        text = text.rstrip("\n") + f"\n# {comment}\n"
    for name in more:
        value = _escaped(parameters[name])
        text += f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
    return text


def _of_public(deployment: Deployment, model: str, text: str) -> dict[str, str]:
    if backend_named(text) == "conductor":
        return _led_back(deployment.conductor)
    if "checkpoint" in parameters_of(text):
        return _led_back({"checkpoint": deployment.checkpoint})
    return {}


def template(role: str, parameters: Mapping[str, str], templates: Mapping[str, str]) -> str:
    """The template of a worker: the first model of its role with its engine, else with any."""
    alike = [text for _, text in sorted(templates.items()) if backend_named(text) == role]
    if not alike:
        raise TemplateMissing(
            f"the base model repository has no model with backend {role!r}: name a repository that "
            "has one, like the shipped one, with --model-repository"
        )
    engine = parameters.get("engine", "torch")
    return next((t for t in alike if parameters_of(t).get("engine") == engine), alike[0])


def _led_back(parameters: Mapping[str, str]) -> dict[str, str]:
    found = dict(parameters)
    checkpoint = found.get("checkpoint", "demo")
    if checkpoint != "demo" and not checkpoint.startswith(("/", "~")):
        found["checkpoint"] = BACK + checkpoint
    for name in (*OPTION_FILES, "engine_python"):
        path = found.get(name, "")
        if path and not path.lstrip().startswith("{") and not path.startswith(("/", "~")):
            found[name] = BACK + path
    return found


def _escaped(value: str) -> str:
    return "".join(ESCAPED.get(character, character) for character in value)


def _unescaped(value: str) -> str:
    plain = {escaped[1]: character for character, escaped in ESCAPED.items()}
    return re.sub(r"\\(.)", lambda match: plain.get(match[1], match[1]), value)
