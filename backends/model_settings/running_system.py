"""Client of GET /settings on the metrics port: the settings that a running `mooncake serve` uses,
and whether each edited config.pbtxt was loaded.

Not here: tracking edits (backends/launcher/repository.py), planning them (edit.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from backends.direct_http import CALL_FAILED, DIRECTLY
from backends.shipped import DEFAULT_REPOSITORY

ASK_S_MAX = 5.0  # timeout of one GET /settings
POLL_S = 0.2  # pause between two polls
GONE_S_MAX = 10.0  # seconds without an answer after which the system counts as ended
PENDING, LOADED, REFUSED = "pending", "loaded", "refused"
REPLACED = "replaced"  # the file changed again before this version was loaded or refused


@dataclass(frozen=True, slots=True)
class EditState:
    """The state of one version of a model's config.pbtxt."""

    digest: str  # repository_files.digest of the file in the model repository
    outcome: str  # PENDING, LOADED or REFUSED; from `wait_for` also REPLACED
    reason: str = ""  # why the file was refused; "" unless outcome is REFUSED


@dataclass(frozen=True, slots=True)
class RunningSettings:
    """The answer to GET /settings on the metrics port."""

    repository: str  # absolute path of the model repository
    # Given option of `mooncake serve` -> value. checkpoint, dtype and device override every
    # config.pbtxt; prefill and decode are numbers of workers.
    options: Mapping[str, str]
    made: Mapping[str, str]  # worker without its own model folder -> folder it is rendered from
    # Worker folders that are not served, because --prefill or --decode is lower than the number of
    # folders.
    left_out: list[str]
    nodes: list[str]  # names of this host's storage nodes
    directory: str = ""  # ipc:// address of the metadata directory; "" if it listens on TCP
    http: str = ""  # HOST:PORT of Triton's HTTP port of this host's frontend; "": no frontend
    openai: str = ""  # HOST:PORT of this host's gateway; "": no gateway
    models: Mapping[str, EditState] = field(default_factory=dict)  # model -> its newest edit
    # Kind of a process -> PIDs, valid in `pid_space`
    # (mooncake_store/process/process_memory.py). Descendants of a process that have no entry belong
    # to its kind.
    processes: Mapping[str, list[int]] = field(default_factory=dict)
    pid_space: str = ""

    def serves(self, repository: Path) -> bool:
        return Path(self.repository) == repository.resolve()


Ask = Callable[[], RunningSettings | None]  # reads the settings; None: no valid answer


def named_or_served(repository: Path, ask: Ask) -> Path:
    """`repository`, or the running system's repository if `repository` is the default folder and
    does not exist. The default folder exists only in a checkout."""
    if repository == DEFAULT_REPOSITORY and not repository.is_dir():
        running = ask()
        if running is not None and Path(running.repository).is_dir():
            return Path(running.repository)
    return repository


def ask_at(metrics_url: str) -> Ask:
    """A function that reads the settings at this metrics port. The function returns None if it gets
    no answer or an invalid one."""
    url = metrics_url.removesuffix("/").removesuffix("/metrics") + "/settings"

    def ask() -> RunningSettings | None:
        try:
            with DIRECTLY.open(url, timeout=ASK_S_MAX) as answer:
                return msgspec.convert(json.load(answer), RunningSettings)
        except (*CALL_FAILED, ValueError, msgspec.ValidationError):
            return None

    return ask


def outcomes(wanted: Mapping[str, str], running: RunningSettings | None) -> dict[str, EditState]:
    """Model -> state of the version in `wanted` (model -> digest). The state is PENDING until the
    running system reports this digest. Pure."""
    found = {}
    for model, digest in wanted.items():
        state = running.models.get(model) if running is not None else None
        if state is None or state.digest != digest:
            state = EditState(digest, PENDING)
        found[model] = state
    return found


def wait_for(
    wanted: Mapping[str, str],
    ask: Ask,
    seconds_max: float,
    is_unchanged: Callable[[str], bool] = lambda model: True,
) -> dict[str, EditState]:
    """Poll until no outcome is PENDING. After `seconds_max`, or GONE_S_MAX without an answer, the
    result may have PENDING outcomes. The last poll may exceed the limit by ASK_S_MAX.

    `wanted`: model -> digest. `is_unchanged(model)`: the file is still the version in `wanted`.
    """
    answered_s = time.monotonic()
    give_up_s = answered_s + seconds_max
    while True:
        running, now_s = ask(), time.monotonic()
        answered_s = now_s if running is not None else answered_s
        found = outcomes(wanted, running)
        for model, state in found.items():
            if state.outcome == PENDING and not is_unchanged(model):
                found[model] = replace(state, outcome=REPLACED)
        is_over = now_s > give_up_s or now_s - answered_s > GONE_S_MAX
        if is_over or all(state.outcome != PENDING for state in found.values()):
            return found
        time.sleep(POLL_S)
