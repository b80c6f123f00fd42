"""`mooncake replay`: sends a published trace to a running server, at the trace's own times.

Reads the trace, asks the server what fits, refuses what does not before anything is sent, then runs
the open loop and prints a summary. Ctrl-C stops the sending and prints the summary of what is done.

Not here: sending (run.py), what the numbers mean (metrics.py), how they are printed (tables.py),
prompts (workloads.py), the report as a page (report/).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import replay_options as options
from loadtest import tables
from loadtest.addresses import addresses_of
from loadtest.metrics import COMPLETED, RequestRecord, Summary, summarize
from loadtest.open_loop import WallClock
from loadtest.protocol import CHANNELS, REQUEST_S_MAX, ServerError
from loadtest.recording import Recording, Sample, slim
from loadtest.reuse import ideal_cached_tokens
from loadtest.run import Run, SendOptions, send_all
from loadtest.sampler import Sampler
from loadtest.server_info import ServerDescription, describe_server
from loadtest.slo import Slo, goodput
from loadtest.trace import TraceError, TraceRow, read_trace
from loadtest.triton_client import TritonClient
from loadtest.workloads import TokenSource, TooLong, plan, too_long

LINES_SHOWN_MAX = 10


class ReplayRefused(Exception):
    """Nothing was sent; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Which part of which trace, and how fast and large."""

    trace: Path
    requests_max: int | None
    length_scale: float
    speed: float
    seed: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the run leaves besides its summary."""

    rows: Path | None = None
    report: Path | None = None
    metrics_url: str | None = None  # None: the server's load is not sampled
    slo: Slo | None = None
    as_json: bool = False


def ideal_of(run: Run, block_tokens: int) -> dict[int, int]:
    """Index -> cached tokens that an unlimited cache would have given to the completed requests."""
    done = sorted(record.index for record in run.records if record.outcome == COMPLETED)
    prompts = (run.planned[index].prompt_ids for index in done)
    return dict(zip(done, ideal_cached_tokens(prompts, block_tokens), strict=True))


def refusal(problem: TooLong, length_scale: float, context_tokens_max: int) -> str:
    shown = ", ".join(map(str, problem.lines[:LINES_SHOWN_MAX]))
    more = len(problem.lines) - LINES_SHOWN_MAX
    return (
        f"{len(problem.lines)} requests do not fit the server's context of "
        f"{context_tokens_max:,} tokens at --length-scale {length_scale:g}: lines {shown}"
        f"{f' and {more} more' if more > 0 else ''}; the longest needs "
        f"{problem.context_tokens:,} tokens. All fit at --length-scale {problem.length_scale:g}."
    )


def prepare(rows: Sequence[TraceRow], server: ServerDescription, settings: Settings) -> Run:
    """The run before its start, or ReplayRefused."""
    scale = settings.length_scale
    if problem := too_long(rows, scale, server.context_tokens_max):
        raise ReplayRefused(refusal(problem, scale, server.context_tokens_max))
    source = TokenSource(server.vocabulary_tokens, server.special_token_ids, settings.seed)
    return Run(plan(rows, source, scale, settings.speed))


def row_of(record: RequestRecord, ideal: Mapping[int, int]) -> dict[str, object]:
    """One line of --out: what was measured of one request."""
    row = dataclasses.asdict(record)
    measured = {"lag_s": record.lag_s, "ttft_s": record.ttft_s, "tbt_s": record.tbt_s}
    return row | measured | {"ideal_cached_tokens": ideal.get(record.index)}


def write_rows(path: Path, run: Run, ideal: Mapping[int, int]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in sorted(run.records, key=lambda record: record.index):
            file.write(json.dumps(row_of(record, ideal)) + "\n")


async def _describe(sending: SendOptions, chosen: Mapping[str, int | None]) -> ServerDescription:
    async with TritonClient(sending.url, sending.model, channels=1) as client:
        return await describe_server(client, chosen)


def recording_of(
    run: Run,
    settings: Settings,
    sending: SendOptions,
    outputs: Outputs,
    ideal: Mapping[int, int],
    samples: Sequence[Sample],
    started_at: datetime,
) -> Recording:
    """The run as a file keeps it."""
    described = dataclasses.asdict(settings) | {"trace": settings.trace.name}
    described |= dataclasses.asdict(sending) | {
        "planned": len(run.planned), "cancelled": run.started - len(run.records),
        "is_interrupted": run.is_interrupted, "metrics_url": outputs.metrics_url,
    }  # fmt: skip
    return Recording(
        name="replay",
        title=f"Replay of {settings.trace.name} at {settings.speed:g}x to {sending.url}",
        started_at=started_at.isoformat(timespec="seconds"),
        settings=described,
        requests=slim(sorted(run.records, key=lambda record: record.index)),
        samples=list(samples),
        slo=outputs.slo,
        ideal_cached_tokens=dict(ideal),
    )


def _run_with_progress(
    run: Run, sending: SendOptions, metrics_url: str | None, console: Console
) -> list[Sample]:
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("in flight {task.fields[in_flight]}, not served {task.fields[bad]}"),
    )
    samplers: list[Sampler] = []
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task("replay", total=len(run.planned), in_flight=0, bad=0)

        def on_change(run: Run) -> None:
            ended = len(run.records)
            is_bad = run.records[-1].outcome != COMPLETED
            bad = progress.tasks[0].fields["bad"] + is_bad
            progress.update(bar, completed=ended, in_flight=run.started - ended, bad=bad)

        async def send() -> None:
            clock = WallClock()
            if metrics_url is not None:
                samplers.append(Sampler(metrics_url, clock.now_s))
                samplers[0].start()
            await send_all(run, sending, clock, on_change)

        asyncio.run(send())
    samples = [sample for sampler in samplers for sample in sampler.stop()]
    if samplers and not samples:
        console.print(f"no samples of the server: {samplers[0].problem}", style="yellow")
    return samples


def replay(
    trace: options.Trace,
    requests: options.Requests = None,
    length_scale: options.LengthScale = 1.0,
    speed: options.Speed = 1.0,
    url: options.Url = "127.0.0.1:8001",
    model: options.Model = "conductor",
    seed: options.Seed = 0,
    ignore_eos: options.IgnoreEos = True,
    as_json: options.AsJson = False,
    out: options.Out = None,
    report: options.Report = None,
    metrics_url: options.MetricsUrl = None,
    slo_ttft_s: options.SloTtft = None,
    slo_tbt_s: options.SloTbt = None,
    block_tokens: options.BlockTokens = None,
    context_tokens: options.ContextTokens = None,
    vocabulary: options.Vocabulary = None,
    timeout_s: options.Timeout = REQUEST_S_MAX,
    channels: options.Channels = CHANNELS,
) -> None:
    """Send a request trace to a running server at its own times, and print what came of it.

    Each hash id of the trace becomes the same tokens wherever it occurs, so prompts share exactly
    the prefixes that the trace's requests shared. loadtest/README.md explains every number.
    """
    for name, value in (
        ("--length-scale", length_scale), ("--speed", speed),
        ("--slo-ttft-s", slo_ttft_s), ("--slo-tbt-s", slo_tbt_s),
    ):  # fmt: skip
        if value is not None and not (math.isfinite(value) and value > 0):
            raise typer.BadParameter(f"{name} is {value}; it must be a positive number")
    chosen = {
        "block_tokens": block_tokens,
        "context_tokens_max": context_tokens,
        "vocabulary_tokens": vocabulary,
    }
    settings = Settings(trace, requests, length_scale, speed, seed)
    is_explained = out is not None or report is not None
    sending = SendOptions(url, model, ignore_eos, timeout_s, channels, is_explained)
    slo = Slo(slo_ttft_s, slo_tbt_s)
    outputs = Outputs(
        rows=out,
        report=report,
        metrics_url=sampled_url(metrics_url, url) if report is not None else None,
        slo=slo if slo != Slo() else None,
        as_json=as_json,
    )
    raise typer.Exit(carry_out(settings, sending, chosen, outputs))


def carry_out(
    settings: Settings, sending: SendOptions, chosen: Mapping[str, int | None], outputs: Outputs
) -> int:
    """The whole command; returns its exit status."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        rows = read_trace(settings.trace, settings.requests_max)
        server = asyncio.run(_describe(sending, chosen))
        run = prepare(rows, server, settings)
        for path in filter(None, (outputs.rows, outputs.report)):
            path.open("ab").close()  # refused now rather than after the run
    except (OSError, TraceError, ServerError, ReplayRefused) as error:
        errors.print(f"cannot replay: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    for name in server.assumed:
        value = getattr(server, name)
        errors.print(f"the server does not say its {name}; assuming {value:,}", style="yellow")
    started_at = datetime.now(timezone.utc)
    samples = _run_with_progress(run, sending, outputs.metrics_url, errors)
    ideal = ideal_of(run, server.block_tokens)
    summary = summarize(run.records, ideal)
    console.print(tables.summary_tables(summary))
    if outputs.slo is not None:
        console.print(tables.goodput_line(goodput(run.records, outputs.slo), outputs.slo))
    if run.is_interrupted:
        console.print(
            f"Interrupted: {run.started} of {len(run.planned)} requests had been sent; the "
            f"{run.started - len(run.records)} without an answer were cancelled and do not count."
        )
    if outputs.rows is not None:
        write_rows(outputs.rows, run, ideal)
    if outputs.report is not None:
        from loadtest.report.page import write_report  # draws: loads matplotlib

        write_report(
            recording_of(run, settings, sending, outputs, ideal, samples, started_at),
            outputs.report,
        )
        console.print(f"report: {outputs.report}", soft_wrap=True)
    if outputs.as_json:
        print(json.dumps(json_line(run, summary, settings, outputs.slo)))
    if run.is_interrupted:
        return 130
    return 0 if summary.completed else 1


def json_line(
    run: Run, summary: Summary, settings: Settings, slo: Slo | None = None
) -> dict[str, object]:
    line: dict[str, object] = {
        "name": "replay",
        "trace": settings.trace.name,
        "length_scale": settings.length_scale,
        "speed": settings.speed,
        "seed": settings.seed,
        "planned": len(run.planned),
        "cancelled": run.started - len(run.records),
        "is_interrupted": run.is_interrupted,
    }
    if slo is not None:
        line["slo"] = dataclasses.asdict(slo)
        line["goodput"] = dataclasses.asdict(goodput(run.records, slo))
    return line | dataclasses.asdict(summary)


def sampled_url(chosen: str | None, grpc_url: str) -> str | None:
    """The page to sample: as chosen, none, or where it is by convention."""
    if chosen is not None:
        return chosen if chosen != "none" else None
    try:
        return addresses_of(grpc_url).metrics_url
    except ValueError as error:
        raise typer.BadParameter(f"--url: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `mooncake replay ARGUMENTS`; the CLI calls this so that it imports nothing early."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(replay)
    command = typer.main.get_command(app)
    command.main(arguments and list(arguments), prog_name="mooncake replay")
    return 0


if __name__ == "__main__":
    main()
