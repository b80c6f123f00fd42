"""The settings of a running `mooncake serve`, from its metrics port, and the outcomes of edits.

Not here: tracking edits (backends/launcher/repository.py), planning them (edit.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from backends.direct_http import DIRECTLY
from backends.shipped import DEFAULT_REPOSITORY

DEFAULT_METRICS_URL = "http://127.0.0.1:8002/metrics"
ASK_S_MAX = 5.0
POLL_S = 0.2
GONE_S_MAX = 10.0  # a system that does not answer for so long has ended
PENDING, LOADED, REFUSED = "pending", "loaded", "refused"
REPLACED = "replaced"  # another edit replaced it before it was loaded or refused


@dataclass(frozen=True, slots=True)
class EditState:
    """The state of a model's newest config.pbtxt."""

    digest: str  # digest of the operator's file
    outcome: str  # PENDING, LOADED or REFUSED
    reason: str = ""  # why it was refused; the previous settings stay in use


@dataclass(frozen=True, slots=True)
class RunningSettings:
    """The answer to GET /settings on the metrics port."""

    repository: str  # absolute path
    options: Mapping[str, str]  # options of `mooncake serve`, which override every config.pbtxt
    made: Mapping[str, str]  # worker without a folder -> the folder that it is made from
    left_out: list[str]  # worker folders beyond the number of workers
    nodes: list[str]  # storage nodes of this host
    directory: str = ""  # its address, if it is a Unix socket; else ""
    http: str = ""  # HOST:PORT of this host's frontend; "": none
    openai: str = ""  # HOST:PORT of this host's gateway; "": none
    models: Mapping[str, EditState] = field(default_factory=dict)

    def serves(self, repository: Path) -> bool:
        return Path(self.repository) == repository.resolve()


Ask = Callable[[], RunningSettings | None]


def named_or_served(repository: Path, ask: Ask) -> Path:
    """`repository`, or that of the running system if the default repository does not exist. The
    default repository exists only in a checkout."""
    if repository == DEFAULT_REPOSITORY and not repository.is_dir():
        running = ask()
        if running is not None and Path(running.repository).is_dir():
            return Path(running.repository)
    return repository


def ask_at(metrics_url: str) -> Ask:
    """A function that reads the settings at this metrics page; it returns None without an
    answer."""
    url = metrics_url.removesuffix("/").removesuffix("/metrics") + "/settings"

    def ask() -> RunningSettings | None:
        try:
            with DIRECTLY.open(url, timeout=ASK_S_MAX) as answer:
                return msgspec.convert(json.load(answer), RunningSettings)
        except (OSError, ValueError, msgspec.ValidationError):
            return None

    return ask


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """The outcome of one edited model in a running system."""

    model: str
    outcome: str  # PENDING (after a timeout), LOADED, REFUSED or REPLACED
    reason: str = ""


def outcomes(wanted: Mapping[str, str], running: RunningSettings | None) -> list[ReloadOutcome]:
    """The outcomes of the models whose files have these digests. Pure."""
    found = []
    for model, digest in wanted.items():
        state = running.models.get(model) if running is not None else None
        if state is None or state.digest != digest:
            found.append(ReloadOutcome(model, PENDING))
        else:
            found.append(ReloadOutcome(model, state.outcome, state.reason))
    return found


def wait_for(
    wanted: Mapping[str, str],
    ask: Ask,
    seconds_max: float,
    is_there: Callable[[str], bool] = lambda model: True,
) -> list[ReloadOutcome]:
    """Wait until no outcome is pending, for at most `seconds_max`, or until the system is gone.
    `wanted` maps models to digests. `is_there(model)` is True if its file still has this digest."""
    answered_s = time.monotonic()
    give_up_s = answered_s + seconds_max
    while True:
        running, now_s = ask(), time.monotonic()
        answered_s = now_s if running is not None else answered_s
        found = [
            replace(each, outcome=REPLACED)
            if each.outcome == PENDING and not is_there(each.model)
            else each
            for each in outcomes(wanted, running)
        ]
        is_over = now_s > give_up_s or now_s - answered_s > GONE_S_MAX
        if is_over or all(each.outcome != PENDING for each in found):
            return found
        time.sleep(POLL_S)
