"""The config.pbtxt files of one host, made of those that we ship and of what the deployment says.

A template keeps its comments and tensors; values of its parameters are replaced, and parameters
that it does not mention are put at its end. Paths of the cluster file start in its own folder, and
those of a rendered model repository beside that, so relative ones are led back.

Not here: writing the files, and what an operator did with them since (rendered_folder.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import HostPlan, gpus_of
from backends.shipped import named_or_shipped

CONFIG = "config.pbtxt"
BYTES = "surrogateescape"  # a comment may be in any encoding
BACK = "../../"  # from beside rendered/HOST/model_repository to the folder of the cluster file
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
    """The base model repository lacks a model to render others from."""


def templates_in(base: Path) -> dict[str, str]:
    """The text of each config.pbtxt of a model repository to render from, by model."""
    base = named_or_shipped(base)
    if not base.is_dir():
        raise TemplateMissing(
            f"there is no model repository at {base} to render from: run from the project's root, "
            "name one with --model-repository, or leave that out for the shipped one"
        )
    return {
        path.parent.name: path.read_text("utf-8", BYTES)
        for path in sorted(base.glob(f"*/{CONFIG}"))
    }


def rendered_models(
    deployment: Deployment, plan: HostPlan, templates: Mapping[str, str]
) -> dict[str, str]:
    """The text of each model's config.pbtxt; `templates`: those of the base repository."""
    head = f"# Rendered from {deployment.file_name}; an edit here wins until "
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
    """As a config.pbtxt states them, one to a line as we ship it."""
    return {match["key"]: _unescaped(match["value"]) for match in PARAMETER.finditer(text)}


def with_parameters(
    text: str, parameters: Mapping[str, str], more_said: str = "As the cluster file says."
) -> str:
    """The same file with these values; comments stay where they are. `more_said`: the comment above
    parameters that it did not have."""

    def replaced(match: re.Match[str]) -> str:
        value = parameters.get(match["key"])
        if value is None:
            return match[0]
        return match["before"] + _escaped(value) + match["after"]

    text = PARAMETER.sub(replaced, text)
    more = [name for name in parameters if name not in parameters_of(text)]
    if more:
        text = text.rstrip("\n") + f"\n# {more_said}\n"
    for name in more:
        value = _escaped(parameters[name])
        text += f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
    return text


def _of_public(deployment: Deployment, model: str, text: str) -> dict[str, str]:
    """Parameters of what clients call: the conductor's, and whose tokenizer it is."""
    if backend_named(text) == "conductor":
        return _led_back(deployment.conductor)
    if "checkpoint" in parameters_of(text):
        return _led_back({"checkpoint": deployment.checkpoint})
    return {}


def template(role: str, parameters: Mapping[str, str], templates: Mapping[str, str]) -> str:
    """What a worker with these parameters is rendered from: a model of its role, of its engine if
    there is one."""
    alike = [text for _, text in sorted(templates.items()) if backend_named(text) == role]
    if not alike:
        raise TemplateMissing(
            f"the base model repository has no model with backend {role!r}: name the "
            "shipped one with --model-repository"
        )
    engine = parameters.get("engine", "torch")
    return next((t for t in alike if parameters_of(t).get("engine") == engine), alike[0])


def _led_back(parameters: Mapping[str, str]) -> dict[str, str]:
    found = dict(parameters)
    checkpoint = found.get("checkpoint", "demo")
    if checkpoint != "demo" and not checkpoint.startswith(("/", "~")):
        found["checkpoint"] = BACK + checkpoint
    options = found.get("llm_options", "")
    if options and not options.lstrip().startswith("{") and not options.startswith("/"):
        found["llm_options"] = BACK + options
    return found


def _escaped(value: str) -> str:
    return "".join(ESCAPED.get(character, character) for character in value)


def _unescaped(value: str) -> str:
    plain = {escaped[1]: character for character, escaped in ESCAPED.items()}
    return re.sub(r"\\(.)", lambda match: plain.get(match[1], match[1]), value)
