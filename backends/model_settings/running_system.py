"""A running `mooncake serve` as its metrics port describes it, and waiting for what it makes of an
edit.

Not here: keeping track of edits (backends/launcher/repository.py), writing them (edit.py).
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
GONE_S_MAX = 10.0  # a launcher on a busy machine may be late with an answer
PENDING, LOADED, REFUSED = "pending", "loaded", "refused"
REPLACED = "replaced"  # by another edit, before anything came of it


@dataclass(frozen=True, slots=True)
class EditState:
    """What became of a model's newest config.pbtxt."""

    digest: str  # of the operator's file
    outcome: str  # pending | loaded | refused
    reason: str = ""  # why it was refused; the settings before it go on


@dataclass(frozen=True, slots=True)
class RunningSettings:
    """GET /settings of the metrics port."""

    repository: str  # absolute
    options: Mapping[str, str]  # said by options of `mooncake serve`, above every config.pbtxt
    made: Mapping[str, str]  # worker without a folder -> the folder that it is made of
    left_out: list[str]  # workers beyond the number that was asked for
    nodes: list[str]  # storage nodes of this host
    directory: str = ""  # its address, where only this machine has it
    http: str = ""  # HOST:PORT of this host's frontend; "": it has none
    openai: str = ""  # HOST:PORT of this host's gateway; "": it has none
    models: Mapping[str, EditState] = field(default_factory=dict)

    def serves(self, repository: Path) -> bool:
        return Path(self.repository) == repository.resolve()


Ask = Callable[[], RunningSettings | None]


def named_or_served(repository: Path, ask: Ask) -> Path:
    """For who names none: outside of a checkout there is no default one, but a running system
    says which it has."""
    if repository == DEFAULT_REPOSITORY and not repository.is_dir():
        running = ask()
        if running is not None and Path(running.repository).is_dir():
            return Path(running.repository)
    return repository


def ask_at(metrics_url: str) -> Ask:
    """Asks the system with this metrics page; None while none of ours answers there."""
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
    """What a running system said of one edited model."""

    model: str
    outcome: str  # pending: it said nothing in time; or loaded, refused, replaced
    reason: str = ""


def outcomes(wanted: Mapping[str, str], running: RunningSettings | None) -> list[ReloadOutcome]:
    """Of models whose files have these digests. Pure."""
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
    """Until nothing of it is pending, the time is over, or the system is gone for a while;
    `wanted`: model -> digest. `is_there`: does its file still say that?"""
    heard_s = time.monotonic()
    give_up_s = heard_s + seconds_max
    while True:
        running, now_s = ask(), time.monotonic()
        heard_s = now_s if running is not None else heard_s
        found = [
            replace(each, outcome=REPLACED)
            if each.outcome == PENDING and not is_there(each.model)
            else each
            for each in outcomes(wanted, running)
        ]
        is_over = now_s > give_up_s or now_s - heard_s > GONE_S_MAX
        if is_over or all(each.outcome != PENDING for each in found):
            return found
        time.sleep(POLL_S)
