"""Preparing a run: read the settings, ask the server for its description, and measure it unloaded.

The deciding process prepares, alone or as the master. A reason not to start is a CannotStart. Texts
of unloaded requests are new each time, so that no cached block of an earlier run changes a time.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.client.answer import ReceivedAnswer
from loadtest.client.openai_server import served_at
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.client.server import (
    DESCRIBE,
    NOT_UNDERSTOOD,
    ServerDescription,
    described,
    description,
)
from loadtest.replay.datasets import DATA_SETS, rows_of
from loadtest.replay.prompts import TokenSource, planned_request
from loadtest.replay.prompts import too_long as trace_too_long
from loadtest.replay.trace import TraceError, TraceRow, TraceSettings, scaled_lengths
from loadtest.results.metrics import COMPLETED
from loadtest.users.run import Outgoing, RequestSender, send_one
from loadtest.users.senders import make_sender
from loadtest.users.settings import LoadSettings, SettingsError, settings_of
from loadtest.users.tenants import UserIdentity
from loadtest.users.text import ServerFacts
from loadtest.users.trace_share import DataSetShare, data_set_too_long
from loadtest.users.verdict import Unloaded
from loadtest.users.workloads import TEXT_WORKLOADS, author_of, too_long

log = logging.getLogger(__name__)
ASK_S_MAX = 30.0
SAMPLE_CHARACTERS = 2_000
BYTES_PER_TOKEN_ASSUMED = 3.0
SEED_BITS = 32


class CannotStart(Exception):
    """The run cannot begin; the message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Preparation:
    settings: LoadSettings
    facts: ServerFacts
    rows: Sequence[TraceRow]
    unloaded: dict[str, Unloaded]


def read_settings(environment: Any) -> LoadSettings:
    """Settings from Locust's options; user classes on its command line select from the mix."""
    options = vars(environment.parsed_options)
    settings = settings_of(options, environment.host)
    if chosen := options.get("user_classes"):
        picked = [user.workload for user in environment.user_classes if user.__name__ in chosen]
        mix = {name: settings.mix.get(name, 1) for name in picked}
        if "trace" in mix and settings.trace is None:
            raise SettingsError("to replay a trace, start Locust with --workload trace")
        trace = settings.trace if "trace" in mix else None
        settings = dataclasses.replace(settings, mix=mix, trace=trace)
    return settings


def prepare(environment: Any) -> Preparation:
    try:
        settings = read_settings(environment)
        rows = read_rows(settings.trace)
        if settings.report is not None:
            settings.report.open("ab").close()  # a wrong path fails before the run
    except (SettingsError, TraceError, OSError) as error:
        raise CannotStart(str(error)) from error
    try:
        said, model = ask_description(settings)
        target = make_sender(settings, model, time.perf_counter)
    except ServerError as error:
        raise CannotStart(f"{error.kind}: {error.message}") from error
    try:
        facts = ask_facts(settings, target, description(said), model)
        if problems := misfits(settings, facts, rows):
            raise CannotStart("; ".join(problems))
        is_relative = settings.ttft_limit.times_unloaded or settings.tbt_limit.times_unloaded
        unloaded = measure_unloaded(target, settings, facts, rows) if is_relative else {}
        bring_prefixes(target, settings, facts)
    finally:
        target.close()
    return Preparation(settings, facts, rows, unloaded)


def read_rows(trace: TraceSettings | None) -> Sequence[TraceRow]:
    return rows_of(trace) if trace is not None else ()


def ask_facts(
    settings: LoadSettings, target: RequestSender, found: ServerDescription, model: str
) -> ServerFacts:
    """The facts from the server's description; `target` counts the tokens of a sample."""
    for name in found.assumed:
        log.warning("the server does not report its %s; assuming %s", name, getattr(found, name))
    # The sample is constant: runs with the same seed must send the same texts.
    sample = author_of(0, "sample", "").prose(SAMPLE_CHARACTERS)
    request = GenerateRequest("sample", text_input=sample, max_tokens=1)
    tokens = _collect(target, unloaded_user(settings, "sample").signed(request)).input_tokens
    if not tokens:
        log.warning(
            "the server does not count tokens; assuming %s bytes each", BYTES_PER_TOKEN_ASSUMED
        )
    bytes_per_token = len(sample) / tokens if tokens else BYTES_PER_TOKEN_ASSUMED
    return ServerFacts(**dataclasses.asdict(found), bytes_per_token=bytes_per_token, model=model)


def unloaded_user(settings: LoadSettings, workload: str) -> UserIdentity:
    """The user of unloaded requests: one of the first tenant."""
    return UserIdentity(workload, "unloaded", next(iter(settings.tenants), None))


def misfits(settings: LoadSettings, facts: ServerFacts, rows: Sequence[TraceRow]) -> list[str]:
    """Why requests of the settings do not fit the server's context; one text each."""
    if settings.trace is not None:
        problem = trace_too_long(rows, settings.trace.length_scale, facts.context_tokens_max)
        return [problem.refusal("--length-scale")] if problem is not None else []
    found = [
        data_set_too_long(DATA_SETS[name], settings.length_scale, facts)
        if name in DATA_SETS
        else too_long(name, settings.sizes, facts)
        for name in settings.mix
    ]
    return [problem for problem in found if problem is not None]


def bring_prefixes(sender: RequestSender, settings: LoadSettings, facts: ServerFacts) -> None:
    """Cache the data sets' shared prefixes before users start, for each tenant."""
    for name in settings.mix:
        data_set = DATA_SETS.get(name)
        if data_set is None or not data_set.prefixes:
            continue
        share = DataSetShare(data_set, facts, settings.seed, settings.length_scale)
        for tenant in settings.tenants or (None,):
            for planned in share.bringing():
                request = planned.to_send(f"prefix-{name}-{planned.index}")
                _collect(sender, UserIdentity(name, "", tenant).signed(request))
        percent = 100 * data_set.shared_tokens / data_set.prompt_tokens
        text = "%s: %d prefixes are cached, %.0f %% of each prompt"
        log.info(text, name, data_set.prefixes, percent)


def measure_unloaded(
    sender: RequestSender, settings: LoadSettings, facts: ServerFacts, rows: Sequence[TraceRow]
) -> dict[str, Unloaded]:
    """Measure a few requests of each workload, one at a time, each from a new user."""
    found = {}
    for name in settings.mix:
        ttft_s, tbt_s = [], []
        for request in unloaded_requests(name, settings, facts, rows):
            outgoing = Outgoing(unloaded_user(settings, name).signed(request), name, 0)
            record, _ = send_one(sender, outgoing, settings.request_s_max, time.perf_counter)
            if record.outcome != COMPLETED or record.ttft_s is None:
                raise CannotStart(
                    f"an unloaded request of {name} was {record.outcome} "
                    f"({record.kind}: {record.message}); is the server otherwise busy?"
                )
            ttft_s.append(record.ttft_s)
            if record.tbt_s is not None:
                tbt_s.append(record.tbt_s)
        found[name] = Unloaded(
            statistics.median(ttft_s), statistics.median(tbt_s) if tbt_s else None, len(ttft_s)
        )
        log.info("unloaded %s: %s", name, found[name].shown())
    return found


def unloaded_requests(
    name: str, settings: LoadSettings, facts: ServerFacts, rows: Sequence[TraceRow]
) -> Iterator[GenerateRequest]:
    """First requests of so many new users, with only the system prompt of `shared` cached."""
    seed = secrets.randbits(SEED_BITS)
    if settings.trace is not None:
        source = TokenSource.of_server(facts, seed)
        scale = settings.trace.length_scale
        for number, row in enumerate(of_all_lengths(rows, scale, settings.unloaded_requests)):
            planned = planned_request(row, number, 0.0, source, scale)
            yield planned.to_send(f"unloaded-trace-{number}")
        return
    if name in DATA_SETS:
        share = DataSetShare(DATA_SETS[name], facts, seed, settings.length_scale)
        for number in range(settings.unloaded_requests):
            yield share.take().to_send(f"unloaded-{name}-{number}")
        return
    for number in range(settings.unloaded_requests):
        user = TEXT_WORKLOADS[name](seed, f"unloaded-{number}", settings.sizes, facts)
        yield user.next().to_send(f"unloaded-{name}-{number}")


def of_all_lengths(rows: Sequence[TraceRow], scale: float, count: int) -> list[TraceRow]:
    """Rows from all over the trace's lengths, the middle one of median length."""
    by_length = sorted(rows, key=lambda row: scaled_lengths(row, scale).prompt_tokens)
    return [by_length[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)]


def ask_description(settings: LoadSettings) -> tuple[Mapping[str, object], str]:
    if settings.gateway is not None:
        served = served_at(settings.gateway, key=settings.any_key)
        return served.facts, served.model
    conductor = make_sender(settings, "conductor", time.perf_counter)
    try:
        return described(_collect(conductor, DESCRIBE)), settings.model
    except CannotStart as error:
        cause = error.__cause__
        if isinstance(cause, ServerError) and cause.kind in NOT_UNDERSTOOD:
            return {}, settings.model
        raise
    finally:
        conductor.close()


def _collect(sender: RequestSender, request: GenerateRequest) -> ReceivedAnswer:
    answer = ReceivedAnswer()
    try:
        for event in sender.send(request, ASK_S_MAX):
            answer.add(event)
    except ServerError as error:
        hint = ""
        if error.kind == "unreachable":
            hint = " Start one with `make serve`, or name it with --host."
        raise CannotStart(f"{error.kind}: {error.message}.{hint}") from error
    return answer
