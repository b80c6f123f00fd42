"""What must be true of a fleet that was attacked, and the report of what was seen.

No answer has a wrong token, nor has what came of one before it broke off; no request hangs. Of
those whose own frontend lived all along, nearly all finish, and the others end with an error of
ours within their deadline. Streams of a frontend that was killed, by itself or with its host, are
counted apart: they end at once. Every host recovers; nothing has grown.

Not here: the requests (streams.py), the faults (fault_injector.py).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.harness.processes import Look
from tests.chaos_serve.answers import RightAnswer
from tests.chaos_serve.fault_injector import ENDS_STREAMS, SILENCE, InjectedFault
from tests.chaos_serve.streams import FINISHED, HUNG, NO_ANSWER, EndedRequest

FINISHED_SHARE_MIN = 0.99
CUT_S_MAX = 3.0  # from the kill of a frontend to the end of its streams
# A frontend makes some parts only when it needs them, each once: its client of the store (27
# descriptors), sockets to the inboxes of four workers (16), connections to two more members of etcd
# (6). The other 11 are for connections that are being made at the moment of the look. Without the
# client of the store, a frontend levels off at 30 more. When each restart of a worker left a socket
# behind, 240 s of faults left 66 and 88 more.
DESCRIPTORS_GROWN_MAX, THREADS_GROWN_MAX = 60, 24
RSS_RATIO_MAX, RSS_GROWN_BYTES_MAX = 1.25, 48 * 2**20  # whichever is more: processes are young
SHOWN_MAX = 10

Rest = Mapping[str, Look]  # "host: process" -> at rest


@dataclass(slots=True)
class ChaosReport:
    """All of it, as numbers and as words."""

    seed: int
    seconds: float
    requests: int = 0
    rejections: int = 0  # that were obeyed, and the request sent again
    outcomes: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)  # their frontend was killed
    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    finished_share: float | None = None  # of those whose frontend lived; None: there was none
    wrong_tokens: int = 0  # requests
    ties: int = 0  # answers that went another way where two tokens are equally good
    hung: int = 0
    errors: list[str] = field(default_factory=list)  # of those whose frontend lived
    cut_s_max: float = 0.0
    recovery_s_max: dict[str, float] = field(default_factory=dict)  # by kind of fault
    broken: list[str] = field(default_factory=list)  # promises; empty: all were kept

    def to_json(self) -> str:
        worst = max(self.recovery_s_max.items(), key=lambda item: item[1], default=("", 0.0))
        fields: dict[str, Any] = {
            "name": "chaos-serve",
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "requests": self.requests,
            "rejections": self.rejections,
            "outcomes": dict(self.outcomes),
            "apart": dict(self.apart),
            "faults": {kind: dict(counts) for kind, counts in sorted(self.by_kind.items())},
            "finished_share": self.finished_share,
            "wrong_tokens": self.wrong_tokens,
            "ties": self.ties,
            "hung": self.hung,
            "cut_s_max": round(self.cut_s_max, 2),
            "recovery_s_max": round(worst[1], 1),
            "recovery_slowest": worst[0],
            "broken": self.broken,
        }
        return json.dumps(fields, allow_nan=False)


def judge(
    report: ChaosReport,
    ended: Sequence[EndedRequest],
    faults: Sequence[InjectedFault],
    answers: Mapping[int, RightAnswer],
) -> None:
    """Fills the report."""
    report.requests = len(ended)
    lived: Counter[str] = Counter()
    for each in ended:
        report.outcomes[each.outcome] += 1
        report.rejections += each.rejections
        _judge_tokens(report, each, answers[each.prompt.number])
        if each.outcome == HUNG:
            report.hung += 1
            report.broken.append(f"hung: {_words(each, faults)}")
        if kill := _frontends_end(each, faults):
            report.apart[each.outcome] += 1
            is_silent = any(
                other.kind in SILENCE
                and set(kill.hosts) & set(other.hosts)
                and other.is_on(kill.began_s)
                for other in faults
            )
            if not is_silent:
                _judge_cut(report, each, kill)
            continue
        lived[each.outcome] += 1
        if each.outcome != FINISHED:
            report.errors.append(_words(each, faults))
        if each.outcome in NO_ANSWER:
            report.broken.append(f"no typed error: {_words(each, faults)}")
        for kind in {
            injected.kind for injected in faults if injected.covers(each.sent_s, each.ended_s)
        }:
            report.by_kind[kind][each.outcome] += 1
    if lived:
        report.finished_share = round(lived[FINISHED] / lived.total(), 5)
        if report.finished_share < FINISHED_SHARE_MIN:
            report.broken.append(
                f"{report.finished_share:.2%} of {lived.total()} streams finished whose frontend "
                f"lived, at least {FINISHED_SHARE_MIN:.0%} must: {dict(lived)}"
            )
    else:
        report.broken.append("no request was sent to a frontend that lived")
    for injected in faults:
        report.by_kind[injected.kind]["faults"] += 1
        if injected.recovery_s is None:
            report.broken.append(f"not recovered from {injected.what}: {injected.problem}")
        else:
            worst = max(report.recovery_s_max.get(injected.kind, 0.0), injected.recovery_s)
            report.recovery_s_max[injected.kind] = round(worst, 2)


def _judge_tokens(report: ChaosReport, ended: EndedRequest, right: RightAnswer) -> None:
    differs = right.first_difference(ended.tokens)
    if differs is not None and differs in right.ties:
        report.ties += 1  # what follows is another right text
        return
    is_short = ended.outcome == FINISHED and len(ended.tokens) < len(right.tokens)
    if differs is None and not is_short and len(ended.tokens) <= len(right.tokens):
        return
    report.wrong_tokens += 1
    report.broken.append(
        f"wrong tokens: {ended.request_id}, prompt {ended.prompt.number}, from token {differs} of "
        f"{len(right.tokens)} ({len(ended.tokens)} came; {ended.workers})"
    )


def _frontends_end(ended: EndedRequest, faults: Sequence[InjectedFault]) -> InjectedFault | None:
    """What killed the request's own frontend while it was there."""
    return next(
        (
            injected
            for injected in faults
            if injected.kind in ENDS_STREAMS
            and ended.host in injected.hosts
            and injected.covers(ended.sent_s, ended.ended_s)
        ),
        None,
    )


def _judge_cut(report: ChaosReport, ended: EndedRequest, kill: InjectedFault) -> None:
    """A stream that was under way ends at once."""
    if ended.outcome == FINISHED or not ended.sent_s < kill.began_s < ended.ended_s:
        return
    cut_s = ended.ended_s - kill.began_s
    report.cut_s_max = max(report.cut_s_max, cut_s)
    if cut_s > CUT_S_MAX:
        report.broken.append(
            f"a stream of a killed frontend ended only {cut_s:.1f} s later ({kill.what}): "
            f"{ended.outcome}: {ended.message[:200]}"
        )


def _words(ended: EndedRequest, faults: Sequence[InjectedFault]) -> str:
    during = [injected.what for injected in faults if injected.covers(ended.sent_s, ended.ended_s)]
    return (
        f"{ended.request_id} at {ended.host} after {ended.ended_s - ended.sent_s:.1f} s with "
        f"{len(ended.tokens)} tokens: {ended.outcome}: {ended.message[:300]} "
        f"(meanwhile: {', '.join(during) or 'nothing'})"
    )


def judge_growth(report: ChaosReport, before: Rest, after: Rest) -> None:
    """Both at rest. A process that was started again is compared with the one before it."""
    for name in sorted(before):
        old, new = before[name], after.get(name)
        if new is None:
            report.broken.append(f"{name} does not run any more")
            continue
        if (grown := new.descriptors - old.descriptors) > DESCRIPTORS_GROWN_MAX:
            report.broken.append(f"{name} has {grown} more descriptors than {old.descriptors}")
        if (grown := new.threads - old.threads) > THREADS_GROWN_MAX:
            report.broken.append(f"{name} has {grown} more threads than {old.threads}")
        grown = new.rss_bytes - old.rss_bytes
        if grown > max(RSS_GROWN_BYTES_MAX, old.rss_bytes * (RSS_RATIO_MAX - 1)):
            report.broken.append(f"{name} has {grown / 2**20:.0f} MiB more than {old.rss_mib:.0f}")


def shown(report: ChaosReport) -> str:
    """For people."""
    lines = [
        f"{report.requests} requests: {_counts(report.outcomes)}; {report.rejections} rejections "
        f"obeyed, {report.ties} near-ties"
    ]
    if report.apart:
        lines.append(
            f"of them with a frontend that was killed: {_counts(report.apart)}; their "
            f"streams ended within {report.cut_s_max:.1f} s"
        )
    for kind, counts in sorted(report.by_kind.items()):
        recovery = report.recovery_s_max.get(kind)
        slowest = "never recovered" if recovery is None else f"recovered within {recovery:.1f} s"
        lines.append(f"  {kind:16} {_counts(counts)}; {slowest}")
    lines += [f"not finished: {each}" for each in report.errors[:SHOWN_MAX]]
    lines += [f"BROKEN {each}" for each in report.broken[:SHOWN_MAX]]
    if len(report.broken) > SHOWN_MAX:
        lines.append(f"... and {len(report.broken) - SHOWN_MAX} more")
    return "\n".join(lines)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
