"""Reports of a run: a progress line every few seconds, and at the end its verdict and its page."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from loadtest.replay.prompts import TokenIds, TokenSource, planned_request
from loadtest.replay.reuse import ideal_of_completed
from loadtest.replay.trace import TraceRow, TraceSettings
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord, Slo, spread
from loadtest.results.recording import Recording, Sample, slim
from loadtest.users.run import UserRun
from loadtest.users.settings import mix_text
from loadtest.users.tenants import group_of
from loadtest.users.verdict import Unloaded, judge, slos

log = logging.getLogger(__name__)


class ProgressLine:
    """Percentiles cover the answers since the line before, because the process that prints the line
    also takes the times of tokens."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        self._seen = 0

    def of(self, records: list[RequestRecord], now_s: float, users: int) -> str:
        """A line from all records so far; records of earlier lines are skipped."""
        new, self._seen = records[self._seen :], len(records)
        self._ended.update(record.outcome for record in new)
        words = ((COMPLETED, "answered"), (REJECTED, "rejected"), (FAILED, "failed"))
        ended = ", ".join(f"{self._ended[outcome]} {word}" for outcome, word in words)
        text = f"{now_s:.0f} s: {users} users, {ended}"
        done = [record for record in new if record.outcome == COMPLETED]
        levels = (("TTFT", [r.ttft_s for r in done]), ("TBT", [r.tbt_s for r in done]))
        found = [
            f"{name} P90 {spread_s.p90 * 1e3:.0f} ms"
            for name, values in levels
            if (spread_s := spread(values)) is not None
        ]
        return f"{text}; of the last: {', '.join(found)}" if found else text


@dataclass(frozen=True, slots=True)
class EndedRun:
    run: UserRun
    rows: Sequence[TraceRow]
    unloaded: Mapping[str, Unloaded]
    samples: Sequence[Sample]
    users: int

    def is_good(self) -> bool:
        """Whether it kept its limits and its report was written; both are logged."""
        settings = self.run.settings
        records = self.run.records.in_order(keep_index=settings.trace is not None)
        limits = (settings.ttft_limit, settings.tbt_limit)
        groups = self.groups(records)
        unloaded = {
            group: self.unloaded[workload]
            for group, workload in groups.items()
            if workload in self.unloaded
        }
        slo_of = slos(list(groups), *limits, unloaded)
        verdict = judge(records, slo_of, unloaded, settings.min_goodput)
        for name in self.tenants_without_requests(records):
            log.warning("tenant %s: none of its requests ended; it may need more users", name)
        if cancelled := self.run.records.cancelled:
            log.info("%d requests were cut off by the end of the run and do not count", cancelled)
        for line in verdict.lines():
            log.log(logging.INFO if verdict.is_passed else logging.WARNING, "%s", line)
        is_reported = settings.report is None or self._write(records, slo_of)
        return verdict.is_passed and is_reported

    def groups(self, records: Sequence[RequestRecord]) -> dict[str, str]:
        """Group name -> workload; without tenants that had no user."""
        settings = self.run.settings
        if not settings.tenants:
            return {workload: workload for workload in settings.mix}
        sent = {record.workload for record in records}
        found = {
            group_of(workload, tenant): workload
            for workload in settings.mix
            for tenant in settings.tenants
        }
        return {group: workload for group, workload in found.items() if group in sent}

    def tenants_without_requests(self, records: Sequence[RequestRecord]) -> list[str]:
        settings, groups = self.run.settings, self.groups(records)
        return [
            tenant.name
            for tenant in settings.tenants
            if not any(group_of(workload, tenant) in groups for workload in settings.mix)
        ]

    def _write(self, records: list[RequestRecord], slo_of: dict[str, Slo]) -> bool:
        from loadtest.report.run_page import write_report  # draws: loads matplotlib

        path = self.run.settings.report
        assert path is not None
        try:
            write_report(self.recording(records, slo_of), path)
        except OSError as error:
            log.error("the report could not be written: %s", error)
            return False
        log.info("report: %s", path)
        return True

    def recording(self, records: list[RequestRecord], slo_of: dict[str, Slo]) -> Recording:
        settings = self.run.settings
        began = datetime.fromtimestamp(self.run.clock.began_unix_s, timezone.utc)
        described = settings.described()
        described["model"] = model = self.run.facts.model
        for name, alone in self.unloaded.items():
            described[f"unloaded_ttft_s of {name}"] = alone.ttft_s
            described[f"unloaded_tbt_s of {name}"] = alone.tbt_s
        ideal = None
        if settings.trace is None:
            described["users"] = self.users
        else:
            ideal = self._ideal(records, settings.trace)
        levels = {*slo_of.values()}
        is_mixed = len(levels) > 1
        common = None if is_mixed or levels == {Slo()} else levels.pop()
        return Recording(
            name="locust",
            title=f"Locust: {mix_text(settings.mix)} to {model} at {described['url']}",
            started_at=began.isoformat(timespec="seconds"),
            settings=described | {"cancelled": self.run.records.cancelled},
            requests=slim(records),
            samples=list(self.samples),
            slo=common,
            slo_by_workload=dict(slo_of) if is_mixed else {},
            ideal_cached_tokens=ideal,
        )

    def _ideal(self, records: list[RequestRecord], trace: TraceSettings) -> dict[int, int]:
        """The unlimited cache's tokens by request, from prompts made again to save memory."""
        source = TokenSource.of_server(self.run.facts, trace.seed)

        def prompt_of(index: int) -> TokenIds:
            row = self.rows[index]
            return planned_request(row, index, 0.0, source, trace.length_scale).prompt_ids

        return ideal_of_completed(records, prompt_of, self.run.facts.block_tokens)
