"""Asks a server, before users come, what they must know of it, and how fast it is unloaded.

Texts of unloaded requests are new each time, not made from the run's seed: what an earlier run
left in the cache must not make the server look faster than it is, nor the other way round.

Not here: what is made of the answers (server_facts.py, verdict.py).
"""

from __future__ import annotations

import json
import logging
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from loadtest.client.answer import StreamedAnswer
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.client.server import description
from loadtest.replay.prompts import TokenSource, scaled_lengths
from loadtest.replay.trace import TraceRow
from loadtest.results.metrics import COMPLETED
from loadtest.users.sender import Sender
from loadtest.users.sending import Outgoing, send_one
from loadtest.users.server_facts import ServerFacts
from loadtest.users.settings import Settings
from loadtest.users.trace_share import TraceShare
from loadtest.users.verdict import Unloaded
from loadtest.users.workloads import TEXT_WORKLOADS, author_of

log = logging.getLogger(__name__)
SAMPLE_CHARACTERS = 2_000
BYTES_PER_TOKEN_ASSUMED = 3.0
SEED_BITS = 32


class CannotStart(Exception):
    """The run cannot begin; the message says why and what to do."""


def ask_facts(conductor: Sender, target: Sender, timeout_s: float) -> ServerFacts:
    """`conductor` describes the server; `target` counts the tokens of a sample."""
    described = _describe(conductor, timeout_s)
    found = description(described)
    for name in found.assumed:
        log.warning("the server does not say its %s; assuming %s", name, getattr(found, name))
    # always the same sample: a run with the same seed must send the same texts
    sample = author_of(0, "sample", "").prose(SAMPLE_CHARACTERS)
    request = GenerateRequest("sample", text_input=sample, max_tokens=1)
    tokens = _collect(target, request, timeout_s).input_tokens
    if not tokens:
        log.warning("the server does not count tokens; assuming %s bytes each",
                    BYTES_PER_TOKEN_ASSUMED)  # fmt: skip
    return ServerFacts(
        block_tokens=found.block_tokens,
        context_tokens_max=found.context_tokens_max,
        vocabulary_tokens=found.vocabulary_tokens,
        special_token_ids=found.special_token_ids,
        bytes_per_token=len(sample) / tokens if tokens else BYTES_PER_TOKEN_ASSUMED,
    )


def measure_unloaded(
    sender: Sender,
    settings: Settings,
    facts: ServerFacts,
    rows: Sequence[TraceRow],
    now_s: Callable[[], float],
) -> dict[str, Unloaded]:
    """A few requests of each workload, one at a time, each by a newcomer."""
    found = {}
    for name in settings.mix:
        ttft_s, tbt_s = [], []
        for request in unloaded_requests(name, settings, facts, rows):
            outgoing = Outgoing(request, name, 0)
            record, _ = send_one(sender, outgoing, settings.request_s_max, now_s)
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
        log.info("unloaded %s: %s", name, shown(found[name]))
    return found


def shown(unloaded: Unloaded) -> str:
    tbt = "" if unloaded.tbt_s is None else f", TBT {unloaded.tbt_s * 1e3:.1f} ms"
    return f"TTFT {unloaded.ttft_s * 1e3:.1f} ms{tbt} (median of {unloaded.requests}, each alone)"


def unloaded_requests(
    name: str, settings: Settings, facts: ServerFacts, rows: Sequence[TraceRow]
) -> Iterator[GenerateRequest]:
    """First requests of as many newcomers: nothing of them is cached but what a workload shares.

    That is the system prompt of `shared`, which is computed for the first of them.
    """
    if name == "trace":
        yield from _trace_requests(settings, facts, rows)
        return
    seed = _fresh_seed()
    for number in range(settings.unloaded_requests):
        ask = TEXT_WORKLOADS[name](seed, f"newcomer-{number}", settings.sizes, facts).next()
        yield GenerateRequest(
            f"unloaded-{name}-{number}", text_input=ask.prompt, max_tokens=ask.max_tokens
        )


def _trace_requests(
    settings: Settings, facts: ServerFacts, rows: Sequence[TraceRow]
) -> Iterator[GenerateRequest]:
    """Rows from all over the trace's lengths, the middle one of median length."""
    scale, count = settings.trace.length_scale, settings.unloaded_requests
    by_length = sorted(rows, key=lambda row: scaled_lengths(row, scale).prompt_tokens)
    picked = [by_length[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)]
    source = TokenSource(facts.vocabulary_tokens, facts.special_token_ids, _fresh_seed())
    for number, row in enumerate(picked):
        planned = TraceShare([row], source, scale, 1.0).take()
        assert planned is not None
        yield GenerateRequest(
            f"unloaded-trace-{number}",
            input_ids=planned.prompt_ids,
            max_tokens=planned.output_tokens,
            min_tokens=planned.output_tokens,
            end_id=-1,
        )


def _describe(conductor: Sender, timeout_s: float) -> Mapping[str, object]:
    """What the server says of itself; empty when it does not know the question."""
    request = GenerateRequest("describe", parameters={"describe": True})
    try:
        answer = _collect(conductor, request, timeout_s)
    except CannotStart as error:
        cause = error.__cause__
        is_unknown = isinstance(cause, ServerError) and cause.kind in (
            "invalid_request", "server_error", "incomplete",
        )  # fmt: skip
        if is_unknown:
            return {}
        raise
    facts = json.loads(answer.text) if answer.finish_reason == "described" else {}
    return facts if isinstance(facts, dict) else {}


def _collect(sender: Sender, request: GenerateRequest, timeout_s: float) -> StreamedAnswer:
    answer = StreamedAnswer()
    try:
        for event in sender.send(request, timeout_s):
            answer.add(event)
    except ServerError as error:
        hint = " Start one with `make serve`, or name it with --host." * (
            error.kind == "unreachable"
        )
        raise CannotStart(f"{error.kind}: {error.message}.{hint}") from error
    return answer


def _fresh_seed() -> int:
    return secrets.randbits(SEED_BITS)
