"""What is made of a run that has ended: the verdict in the log, and the report.

Not here: what the limits are (verdict.py), what the page looks like (loadtest/report).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timezone

from loadtest.replay.reuse import ideal_cached_tokens
from loadtest.results.metrics import COMPLETED, Slo
from loadtest.results.recording import Recording, Sample, slim
from loadtest.users.preparation import Preparation
from loadtest.users.run import Run, trace_share
from loadtest.users.settings import mix_text
from loadtest.users.verdict import Verdict, judge, slos

log = logging.getLogger(__name__)


class Ended:
    """A run, what it began with, and what was seen of the server meanwhile."""

    def __init__(
        self, run: Run, preparation: Preparation, samples: Sequence[Sample], users: int
    ) -> None:
        self.run = run
        self.preparation = preparation
        self.samples = samples
        self.users = users
        settings = run.settings
        self.records = run.records.in_order(keep_index=settings.is_trace)
        limits = (settings.ttft_limit, settings.tbt_limit)
        self.slo_of = slos(list(settings.mix), *limits, preparation.unloaded)


def judged(ended: Ended) -> Verdict:
    """The verdict; it is in the log as well."""
    settings = ended.run.settings
    unloaded = ended.preparation.unloaded
    verdict = judge(ended.records, ended.slo_of, unloaded, settings.min_goodput)
    if cancelled := ended.run.records.cancelled:
        log.info("%d requests were cut off by the end of the run and do not count", cancelled)
    for line in verdict.lines():
        log.log(logging.INFO if verdict.is_passed else logging.WARNING, "%s", line)
    return verdict


def is_reported(ended: Ended) -> bool:
    """Whether the report was written, if one was asked for."""
    path = ended.run.settings.report
    if path is None:
        return True
    from loadtest.report.page import write_report  # draws: loads matplotlib

    try:
        write_report(recording_of(ended), path)
    except OSError as error:
        log.error("the report could not be written: %s", error)
        return False
    log.info("report: %s", path)
    return True


def recording_of(ended: Ended) -> Recording:
    settings = ended.run.settings
    began = datetime.fromtimestamp(ended.run.clock.began_unix_s, timezone.utc)
    described = settings.described()
    for name, alone in ended.preparation.unloaded.items():
        described[f"unloaded_ttft_s of {name}"] = alone.ttft_s
        described[f"unloaded_tbt_s of {name}"] = alone.tbt_s
    ideal = ideal_of(ended) if settings.is_trace else None
    if ideal is None:
        described["users"] = ended.users
    levels = {*ended.slo_of.values()}
    is_mixed = len(levels) > 1
    common = None if is_mixed or levels == {Slo()} else levels.pop()
    return Recording(
        name="locust",
        title=f"Locust: {mix_text(settings.mix)} to {settings.model} at {described['url']}",
        started_at=began.isoformat(timespec="seconds"),
        settings=described | {"cancelled": ended.run.records.cancelled},
        requests=slim(ended.records),
        samples=list(ended.samples),
        slo=common,
        slo_by_workload=dict(ended.slo_of) if is_mixed else {},
        ideal_cached_tokens=ideal,
    )


def ideal_of(ended: Ended) -> dict[int, int]:
    """Row -> cached tokens that an unlimited cache would have given to the completed requests."""
    done = sorted(record.index for record in ended.records if record.outcome == COMPLETED)
    preparation = ended.preparation
    rows = [preparation.rows[index] for index in done]
    share = trace_share(preparation.settings, preparation.facts, rows, 0, 1)
    prompts = (planned.prompt_ids for planned in iter(share.take, None))
    block_tokens = preparation.facts.block_tokens
    return dict(zip(done, ideal_cached_tokens(prompts, block_tokens), strict=True))
