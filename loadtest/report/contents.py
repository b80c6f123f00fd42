"""What stands on a run's page, in order: which pictures under which heading.

Not here: how a picture is drawn (pictures/), how the page looks (templates/).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.report import rows
from loadtest.report.numbers import summary_of
from loadtest.report.phases import measured
from loadtest.report.pictures import latency, pools, prediction, refusals, traffic, where
from loadtest.report.pictures.style import Picture
from loadtest.results.metrics import Slo
from loadtest.results.recording import Recording


@dataclass(frozen=True, slots=True)
class Section:
    heading: str
    pictures: list[Picture]
    phases: list[rows.Phase] = field(default_factory=list)  # a table beside the pictures


def sections(recording: Recording) -> list[Section]:
    records, slo = recording.requests, recording.slo or Slo()
    found = measured(records)
    rejections = summary_of(recording).rejections_by_reason
    return [
        Section("Latency", [
            latency.distribution(
                "TTFT", "Time from sending a request to its first token.",
                rows.by_workload(recording, "ttft_s"), slo.ttft_s),
            latency.distribution(
                "TBT", "Of one request: the mean of the longest tenth of the intervals between "
                "its tokens.", rows.by_workload(recording, "tbt_s"), slo.tbt_s),
        ]),
        Section("Load over time", [
            traffic.requests(recording), traffic.cache(recording),
            pools.prefill(recording), pools.decode(recording),
        ]),
        Section("Where the time went", [
            where.first_token(found), where.whole_request(found), prediction.ttft(records),
        ], rows.phases(found)),
        Section("Served or not", [
            refusals.by_prompt_length(records), refusals.by_reason(rejections, len(records)),
        ]),
    ]  # fmt: skip


def notes(recording: Recording) -> list[str]:
    """What a reader must know before believing the page."""
    found = []
    if recording.settings.get("is_interrupted"):
        cancelled = recording.settings.get("cancelled") or 0
        found.append(
            f"This run was interrupted; {cancelled} requests without an answer were cancelled and "
            "do not count."
        )
    if not recording.requests:
        found.append("No request ended in this run.")
    return found
