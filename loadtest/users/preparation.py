"""What comes before users: the settings are read, the server is asked, and measured unloaded.

Done by the process that decides, alone or as the master. A reason not to start is a CannotStart.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.replay.prompts import too_long as trace_too_long
from loadtest.replay.trace import TraceError, TraceRow, read_trace
from loadtest.users.grpc_sender import GrpcSender
from loadtest.users.http_sender import HttpSender
from loadtest.users.probe import CannotStart, ask_facts, measure_unloaded
from loadtest.users.sender import Sender
from loadtest.users.server_facts import ServerFacts
from loadtest.users.settings import Settings, SettingsError, settings_of
from loadtest.users.verdict import Unloaded
from loadtest.users.workloads import too_long

ASK_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Preparation:
    settings: Settings
    facts: ServerFacts
    rows: Sequence[TraceRow]
    unloaded: dict[str, Unloaded]


def read_settings(environment: Any) -> Settings:
    """From Locust's options; user classes named on its command line pick from the mix."""
    options = vars(environment.parsed_options)
    settings = settings_of(options, environment.host)
    if chosen := options.get("user_classes"):
        picked = [user.workload for user in environment.user_classes if user.__name__ in chosen]
        mix = {name: settings.mix.get(name, 1) for name in picked}
        settings = dataclasses.replace(settings, mix=mix)
    return settings


def read_rows(settings: Settings) -> Sequence[TraceRow]:
    if not settings.is_trace:
        return ()
    assert settings.trace.path is not None
    return read_trace(settings.trace.path, settings.trace.requests_max)


def make_sender(settings: Settings, model: str, now_s: Callable[[], float]) -> Sender:
    if settings.protocol == "grpc":
        return GrpcSender(settings.addresses.grpc, model, now_s)
    return HttpSender(settings.addresses.http, model, now_s)


def prepare(environment: Any) -> Preparation:
    """Raises CannotStart."""
    try:
        settings = read_settings(environment)
        rows = read_rows(settings)
        if settings.report is not None:
            settings.report.open("ab").close()  # refused now rather than after the run
    except (SettingsError, TraceError, OSError) as error:
        raise CannotStart(str(error)) from error
    target = make_sender(settings, settings.model, time.perf_counter)
    conductor = make_sender(settings, "conductor", time.perf_counter)
    try:
        facts = ask_facts(conductor, target, ASK_S_MAX)
        if problems := misfits(settings, facts, rows):
            raise CannotStart("; ".join(problems))
        is_relative = settings.ttft_limit.times_unloaded or settings.tbt_limit.times_unloaded
        unloaded = (
            measure_unloaded(target, settings, facts, rows, time.perf_counter)
            if is_relative else {}
        )  # fmt: skip
    finally:
        target.close()
        conductor.close()
    return Preparation(settings, facts, rows, unloaded)


def misfits(settings: Settings, facts: ServerFacts, rows: Sequence[TraceRow]) -> list[str]:
    """What does not fit the server's context."""
    if settings.is_trace:
        scale = settings.trace.length_scale
        problem = trace_too_long(rows, scale, facts.context_tokens_max)
        if problem is None:
            return []
        return [
            f"{len(problem.lines)} rows of the trace do not fit the server's context of "
            f"{facts.context_tokens_max:,} tokens at --trace-length-scale {scale:g}; all fit at "
            f"--trace-length-scale {problem.length_scale:g}"
        ]
    found = (too_long(name, settings.sizes, facts) for name in settings.mix)
    return [problem for problem in found if problem is not None]
