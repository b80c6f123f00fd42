"""What is made of a run that has ended: the verdict in the log, and the report.

Not here: what the limits are (verdict.py), what the page looks like (loadtest/report).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from loadtest.metrics import COMPLETED, RequestRecord
from loadtest.recording import Recording, Sample, slim
from loadtest.reuse import ideal_cached_tokens
from loadtest.slo import Slo
from loadtest.swarm.preparation import Preparation
from loadtest.swarm.run import Run, trace_share
from loadtest.swarm.settings import mix_text
from loadtest.swarm.verdict import Verdict, judge, slos

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    run: Run
    preparation: Preparation
    samples: Sequence[Sample]
    users: int


def finish(ended: Ended) -> Verdict:
    settings = ended.run.settings
    records = ended.run.records.in_order(keep_index=settings.is_trace)
    slo_of = slos(
        list(settings.mix), settings.ttft_limit, settings.tbt_limit, ended.preparation.unloaded
    )
    verdict = judge(records, slo_of, ended.preparation.unloaded, settings.min_goodput)
    if ended.run.records.cancelled:
        log.info(
            "%d requests were cut off by the end of the run and do not count",
            ended.run.records.cancelled,
        )
    for line in verdict.lines():
        log.log(logging.INFO if verdict.is_passed else logging.WARNING, "%s", line)
    if settings.report is not None:
        from loadtest.report.page import write_report  # draws: loads matplotlib

        write_report(recording_of(ended, records, slo_of), settings.report)
        log.info("report: %s", settings.report)
    return verdict


def recording_of(
    ended: Ended, records: Sequence[RequestRecord], slo_of: Mapping[str, Slo]
) -> Recording:
    settings = ended.run.settings
    began = datetime.fromtimestamp(ended.run.clock.began_unix_s, timezone.utc)
    described = settings.described()
    for name, alone in ended.preparation.unloaded.items():
        described[f"unloaded_ttft_s of {name}"] = alone.ttft_s
        described[f"unloaded_tbt_s of {name}"] = alone.tbt_s
    ideal = ideal_of(ended, records) if settings.is_trace else None
    if ideal is None:
        described["users"] = ended.users
    levels = {*slo_of.values()}
    is_mixed = len(levels) > 1
    common = None if is_mixed or levels == {Slo()} else levels.pop()
    return Recording(
        name="locust",
        title=f"Locust: {mix_text(settings.mix)} to {settings.model} at {described['url']}",
        started_at=began.isoformat(timespec="seconds"),
        settings=described | {"cancelled": ended.run.records.cancelled},
        requests=slim(records),
        samples=list(ended.samples),
        slo=common,
        slo_by_workload=dict(slo_of) if is_mixed else {},
        ideal_cached_tokens=ideal,
    )


def ideal_of(ended: Ended, records: Sequence[RequestRecord]) -> dict[int, int]:
    """Row -> cached tokens that an unlimited cache would have given to the completed requests."""
    done = sorted(record.index for record in records if record.outcome == COMPLETED)
    preparation = ended.preparation
    rows = [preparation.rows[index] for index in done]
    share = trace_share(preparation.settings, preparation.facts, rows, 0, 1)
    prompts = (planned.prompt_ids for planned in iter(share.take, None))
    block_tokens = preparation.facts.block_tokens
    return dict(zip(done, ideal_cached_tokens(prompts, block_tokens), strict=True))
