"""`mooncake config`: checks, compares and sets parameters in the models' config.pbtxt files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from backends.cluster.model_rendering import BYTES, CONFIG
from backends.cluster.rendered_folder import is_rendered
from backends.errors import ConfigError
from backends.metrics.status.readings import DEFAULT_METRICS_URL
from backends.model_settings.checkpoint_facts import facts_beside
from backends.model_settings.differences import differences
from backends.model_settings.edit import FORM, EditRefused, SettingsEdit, plan_edit
from backends.model_settings.model_file import read_model_file
from backends.model_settings.repository_check import check_repository
from backends.model_settings.repository_files import (
    digest,
    read_texts,
    sole_setter,
    unconfigured,
    versionless,
    write_text,
    write_texts,
)
from backends.model_settings.running_system import (
    LOADED,
    PENDING,
    REFUSED,
    REPLACED,
    Ask,
    RunningSettings,
    ask_at,
    named_or_served,
    wait_for,
)
from backends.shipped import DEFAULT_REPOSITORY, shipped_repository
from mooncake_store.cli.arguments import parse_nodes

console = Console(highlight=False, markup=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
EARLIER_S_MAX = 30.0  # longest wait in seconds until an earlier edit of a model is loaded
READY_S_MAX = 300.0  # default of --ready-s-max in seconds; a large checkpoint loads slowly

app = typer.Typer(
    name="config",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Check, compare and change the models' config.pbtxt files, also while they serve.",
)
Repository = Annotated[
    Path, typer.Option("--model-repository", help="The model repository of `mooncake serve`.")
]
MetricsUrl = Annotated[str, typer.Option(help="The metrics page of the running system.")]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


@app.command()
def check(
    model_repository: Repository = DEFAULT_REPOSITORY,
    nodes: Annotated[
        str, typer.Option(help="Storage nodes that `mooncake serve` will have.")
    ] = "s0,s1",
    as_json: AsJson = False,
) -> None:
    """Print every mistake of a model repository; exit status 1 if there is any.

    A repository that was rendered for one host of a deployment may lack a role.
    """
    texts = _texts(model_repository)
    names = None if is_rendered(model_repository) else parse_nodes(nodes)
    found = check_repository(
        texts, facts_beside(model_repository), names, versionless(model_repository, texts)
    )
    for folder in unconfigured(model_repository):
        found.notes.append(f"{folder} has no {CONFIG}: it is not served")
    if as_json:
        console.file.write(json.dumps(asdict(found)) + "\n")
    else:
        for note in found.notes:
            console.print(f"note: {note}")
        for mistake in found.mistakes:
            console.print(mistake)
        count = len(found.mistakes)
        console.print(
            f"{model_repository}: {count} mistake{'s' * (count != 1)}"
            if count
            else f"{model_repository} is right: {', '.join(texts)}"
        )
    sys.exit(bool(found.mistakes))


@app.command()
def diff(
    model_repository: Repository = DEFAULT_REPOSITORY,
    metrics_url: MetricsUrl = DEFAULT_METRICS_URL,
    as_json: AsJson = False,
) -> None:
    """Show parameters that differ from their defaults or from the shipped files, and settings of a
    running system that differ from the files."""
    ask = ask_at(metrics_url)
    model_repository = named_or_served(model_repository, ask)
    texts, shipped_texts = _texts(model_repository), _texts(shipped_repository())
    try:
        files = [read_model_file(model, text) for model, text in texts.items()]
        shipped = {model: read_model_file(model, text) for model, text in shipped_texts.items()}
    except ConfigError as error:
        _fail(str(error))
    found = list(differences(files, shipped))
    running = _of_this(ask, model_repository)
    elsewhere = served_otherwise(running) if running is not None else []
    if as_json:
        content = {"differences": [asdict(each) for each in found], "running": elsewhere}
        console.file.write(json.dumps(content) + "\n")
        return
    for each in found:
        console.print(str(each))
    if not found:
        console.print(f"{model_repository} has only default values")
    for line in elsewhere:
        console.print(line)


def served_otherwise(running: RunningSettings) -> list[str]:
    """One line for each difference between a running system and the files it serves. Pure."""
    found = [
        f"the running system: --{name} {value} overrides the files"
        for name, value in running.options.items()
    ]
    found += [
        f"the running system: {model} is made from {source}"
        for model, source in running.made.items()
    ]
    found += [
        f"the running system: {model} is not served (--prefill or --decode is lower)"
        for model in running.left_out
    ]
    for model, state in running.models.items():
        if state.outcome == REFUSED:
            found.append(f"the running system kept the old settings of {model}: {state.reason}")
        if state.outcome == PENDING:
            found.append(f"the running system has not loaded {model} yet")
    return found


@app.command("set")
def set_values(
    assignments: Annotated[list[str], typer.Argument(metavar="ASSIGNMENT...", help=FORM)],
    model_repository: Repository = DEFAULT_REPOSITORY,
    metrics_url: MetricsUrl = DEFAULT_METRICS_URL,
    ready_s_max: Annotated[
        float, typer.Option(help="Limit in seconds of the wait for the running system.")
    ] = READY_S_MAX,
) -> None:
    """Change parameters in config.pbtxt and wait until the running system serves with them.

    Comments and layout are kept. If any change has a mistake, nothing is written. If the running
    system refuses a model's new file, the old file is restored.
    """
    ask = ask_at(metrics_url)
    model_repository = named_or_served(model_repository, ask)
    with sole_setter(model_repository, console.print):
        _set(assignments, model_repository, ask, ready_s_max)


def _set(assignments: list[str], model_repository: Path, ask: Ask, ready_s_max: float) -> None:
    running = _of_this(ask, model_repository)
    texts = _texts(model_repository)
    try:
        edit = plan_edit(texts, assignments, facts_beside(model_repository), running)
    except EditRefused as refused:
        for problem in refused.problems:
            errors.print(problem)
        _fail("nothing was changed")
    if not edit.changes:
        console.print("all parameters have these values already: nothing was changed")
        return
    for change in edit.changes:
        console.print(str(change))
    if running is not None:
        _wait_for_earlier_edits(running, edit, ask, ready_s_max)
    try:
        write_texts(model_repository, edit.texts, texts)
    except ConfigError as error:
        _fail(f"{error}\nnothing was changed")
    if running is None:
        console.print("written; no running system serves these files, so the next start uses them")
        return
    _follow(edit, texts, model_repository, running, ask, ready_s_max)


def _follow(
    edit: SettingsEdit,
    texts: dict[str, str],
    repository: Path,
    running: RunningSettings,
    ask: Ask,
    ready_s_max: float,
) -> None:
    """Print the outcome of each edited model. Exits with status 1 unless all are LOADED."""
    served = {model: text for model, text in edit.texts.items() if model not in running.left_out}
    for model in edit.texts.keys() - served.keys():
        console.print(f"{model} is written, but not served (--prefill or --decode is lower)")
    with console.status("waits for the running system ..."):
        found = wait_for(
            {model: digest(text.encode("utf-8", BYTES)) for model, text in served.items()},
            ask,
            ready_s_max,
            lambda model: _texts(repository).get(model) == served[model],
        )
    models = {
        outcome: [model for model, state in found.items() if state.outcome == outcome]
        for outcome in (LOADED, REFUSED, REPLACED, PENDING)
    }
    for model in models[LOADED]:
        console.print(f"{model} serves with it; running requests are not interrupted")
    for model in models[REFUSED]:
        errors.print(f"{model} refused it: {found[model].reason}")
        # The old file is restored, so that the next start succeeds, unless it was edited again.
        if _texts(repository).get(model) == edit.texts[model]:
            write_text(repository, model, texts[model])
    if refused := ", ".join(models[REFUSED]):
        _fail(f"{refused}: the old settings stay in use; files not edited again are restored")
    if replaced := ", ".join(models[REPLACED]):
        errors.print(f"{replaced}: replaced by another edit; see `mooncake config diff`")
    if late := ", ".join(models[PENDING]):
        _fail(
            f"{late}: written, but the running system reported no outcome within "
            f"{ready_s_max:.0f} s, or ended; see its terminal and its logs"
        )
    if replaced:
        sys.exit(1)


def _wait_for_earlier_edits(
    running: RunningSettings, edit: SettingsEdit, ask: Ask, ready_s_max: float
) -> None:
    """Wait until earlier edits of the same models are loaded or refused.

    Otherwise the outcome of an earlier edit could be mistaken for the outcome of this one. The wait
    ends after EARLIER_S_MAX, so that this edit can replace an edit that never loads.
    """
    busy = {
        model: state.digest
        for model, state in running.models.items()
        if model in edit.texts and state.outcome == PENDING
    }
    if busy:
        console.print(f"waits for an earlier edit of {', '.join(busy)}")
        wait_for(busy, ask, min(ready_s_max, EARLIER_S_MAX))


def _of_this(ask: Ask, repository: Path) -> RunningSettings | None:
    """The settings of the running system; None if no running system serves `repository`."""
    running = ask()
    if running is None or running.serves(repository):
        return running
    console.print(f"note: the running system serves {running.repository}")
    return None


def _texts(repository: Path) -> dict[str, str]:
    try:
        return read_texts(repository)
    except ConfigError as error:
        _fail(str(error))


def _fail(reason: str) -> NoReturn:
    errors.print(reason)
    sys.exit(1)
