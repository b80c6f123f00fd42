"""`mooncake replay`: sends a published trace to a running server, at the trace's own times.

It reads the trace, asks the server for its limits, and refuses requests that do not fit before it
sends any. Then it runs the open loop and prints a summary. Ctrl-C stops the sending and prints the
summary of the finished requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backends.extras import require
from loadtest.client.metrics_page import MetricsSampler
from loadtest.client.openai_server import ADDRESS as GATEWAY
from loadtest.client.openai_server import http_address, own_key, served_at
from loadtest.client.protocol import CHANNELS, REQUEST_S_MAX, ServerError
from loadtest.client.server import (
    ServerDescription,
    addresses_of,
    ask_description,
    describe_server,
    description,
)
from loadtest.client.triton_client import TritonClient
from loadtest.replay.datasets import DATA_SETS, rows_of
from loadtest.replay.open_loop import ReplayRun, SendOptions, WallClock, send_all
from loadtest.replay.prompts import TokenSource, plan, too_long
from loadtest.replay.reuse import ideal_of_completed
from loadtest.replay.trace import TraceError, TraceRow, TraceSettings
from loadtest.results import tables
from loadtest.results.metrics import COMPLETED, RequestRecord, Slo, Summary, goodput, summarize
from loadtest.results.recording import Recording, Sample, slim

CONDUCTOR = "conductor"


class SentVia(str, Enum):
    GRPC, HTTP, OPENAI = "grpc", "http", "openai"


ADDRESSES = {
    SentVia.GRPC: "127.0.0.1:8001",
    SentVia.HTTP: "127.0.0.1:8000",
    SentVia.OPENAI: GATEWAY,
}


class ReplayRefused(Exception):
    """Nothing was sent; the message names the option to change."""


@dataclass(frozen=True, slots=True)
class ReplayOutputs:
    rows: Path | None = None
    report: Path | None = None
    metrics_url: str | None = None  # None: the server's load is not sampled
    slo: Slo | None = None
    as_json: bool = False


def ideal_of(run: ReplayRun, block_tokens: int) -> dict[int, int]:
    return ideal_of_completed(run.records, lambda i: run.planned[i].prompt_ids, block_tokens)


def prepare(
    rows: Sequence[TraceRow], server: ServerDescription, settings: TraceSettings
) -> ReplayRun:
    """The run before its start, or ReplayRefused."""
    scale = settings.length_scale
    if problem := too_long(rows, scale, server.context_tokens_max):
        raise ReplayRefused(problem.refusal("--length-scale"))
    source = TokenSource.of_server(server, settings.seed)
    return ReplayRun(plan(rows, source, scale, settings.speed))


def row_of(record: RequestRecord, ideal: Mapping[int, int]) -> dict[str, object]:
    row = dataclasses.asdict(record)
    measured = {"lag_s": record.lag_s, "ttft_s": record.ttft_s, "tbt_s": record.tbt_s}
    return row | measured | {"ideal_cached_tokens": ideal.get(record.index)}


def write_rows(path: Path, run: ReplayRun, ideal: Mapping[int, int]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in sorted(run.records, key=lambda record: record.index):
            file.write(json.dumps(row_of(record, ideal)) + "\n")


async def _describe(
    sending: SendOptions, chosen: Mapping[str, int | None]
) -> tuple[SendOptions, ServerDescription]:
    """The server's description; of OpenAI's interface also the model that it serves."""
    if sending.via == SentVia.OPENAI:
        served = served_at(http_address(sending.url), sending.model, sending.key)
        sending = dataclasses.replace(sending, model=served.model)
        return sending, description(chosen, served.facts)
    if sending.via == SentVia.HTTP:
        async with sending.client() as client:
            return sending, description(chosen, await ask_description(client))
    async with TritonClient(sending.url, sending.model, channels=1) as client:
        return sending, await describe_server(client, chosen)


def recording_of(
    run: ReplayRun,
    settings: TraceSettings,
    sending: SendOptions,
    outputs: ReplayOutputs,
    ideal: Mapping[int, int],
    samples: Sequence[Sample],
    started_at: datetime,
) -> Recording:
    described = {"trace": settings.path.name} | dataclasses.asdict(settings)
    del described["path"]  # a report must not show the folder of a file
    described |= dataclasses.asdict(sending)
    del described["key"]
    described |= {
        "planned": len(run.planned),
        "cancelled": run.started - len(run.records),
        "is_interrupted": run.is_interrupted,
        "metrics_url": outputs.metrics_url,
    }
    return Recording(
        name="replay",
        title=f"Replay of {settings.path.name} at {settings.speed:g}x to {sending.url}",
        started_at=started_at.isoformat(timespec="seconds"),
        settings=described,
        requests=slim(sorted(run.records, key=lambda record: record.index)),
        samples=list(samples),
        slo=outputs.slo,
        ideal_cached_tokens=dict(ideal),
    )


def _run_with_progress(
    run: ReplayRun, sending: SendOptions, metrics_url: str | None, console: Console
) -> list[Sample]:
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("in flight {task.fields[in_flight]}, not served {task.fields[bad]}"),
    )
    samplers: list[MetricsSampler] = []
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task("replay", total=len(run.planned), in_flight=0, bad=0)

        def on_change(run: ReplayRun) -> None:
            ended = len(run.records)
            is_bad = run.records[-1].outcome != COMPLETED
            bad = progress.tasks[0].fields["bad"] + is_bad
            progress.update(bar, completed=ended, in_flight=run.started - ended, bad=bad)

        async def send() -> None:
            clock = WallClock()
            if metrics_url is not None:
                key = page_key(sending, metrics_url)
                samplers.append(MetricsSampler(metrics_url, clock.now_s, key=key))
                samplers[0].start()
            await send_all(run, sending, clock, on_change)

        asyncio.run(send())
    samples = [sample for sampler in samplers for sample in sampler.stop()]
    if samplers and not samples:
        console.print(f"no samples of the server: {samplers[0].problem}", style="yellow")
    return samples


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            help="Trace in the published JSONL format, or a data set of the papers: "
            f"{', '.join(DATA_SETS)} (--speed is then requests a second)."
        ),
    ],
    requests: Annotated[
        int | None, typer.Option(min=1, help="Send only the first N requests of the trace.")
    ] = None,
    length_scale: Annotated[
        float, typer.Option(help="Prompts and answers are this much of the trace's lengths.")
    ] = 1.0,
    speed: Annotated[float, typer.Option(help="2 sends twice as fast as the trace.")] = 1.0,
    via: Annotated[
        SentVia, typer.Option(help="Triton's gRPC, Triton's HTTP, or OpenAI's /v1/completions.")
    ] = SentVia.GRPC,
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of the server: of gRPC (default 127.0.0.1:8001), HTTP (127.0.0.1:8000) "
            "or OpenAI's interface (127.0.0.1:9000; its key is in OPENAI_API_KEY).",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model to send to; OpenAI's interface is asked for what it serves.")
    ] = "",
    seed: Annotated[
        int, typer.Option(min=0, max=2**63, help="Other seed, other tokens, same sharing.")
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Answers are as long as the trace's, whatever is generated.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON line, last.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write one JSON line per request, with its decision.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the run as one HTML page, for people and programs.")
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="The server's metrics page, sampled for the report; by default on the port after "
            'gRPC\'s. "none" samples nothing.'
        ),
    ] = None,
    slo_ttft_s: Annotated[
        float | None, typer.Option(help="Count goodput: TTFT of at most this.")
    ] = None,
    slo_tbt_s: Annotated[
        float | None, typer.Option(help="Count goodput: TBT of at most this.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block; asked of the server.")
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(min=2, help="The server's context; asked of the server.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=32, help="Number of token ids; asked of the server.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="A request without a complete answer has failed.")
    ] = REQUEST_S_MAX,
    channels: Annotated[
        int, typer.Option(min=1, max=64, help="gRPC connections; requests take turns.")
    ] = CHANNELS,
) -> None:
    """Send a request trace to a running server at its own times, and print what came of it.

    Each hash id of the trace becomes the same tokens wherever it occurs, so prompts share exactly
    the prefixes that the trace's requests shared. docs/reference/loadtest.md explains every number.
    """
    for name, value in (
        ("--length-scale", length_scale),
        ("--speed", speed),
        ("--slo-ttft-s", slo_ttft_s),
        ("--slo-tbt-s", slo_tbt_s),
    ):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise typer.BadParameter(f"{name} is {value}; it must be a positive number")
    chosen = {
        "block_tokens": block_tokens,
        "context_tokens_max": context_tokens,
        "vocabulary_tokens": vocabulary,
    }
    settings = TraceSettings(trace, requests, length_scale, speed, seed)
    is_explained = out is not None or report is not None
    url = url or ADDRESSES[via]
    model = model or ("" if via == SentVia.OPENAI else CONDUCTOR)
    key = own_key() if via == SentVia.OPENAI else ""  # Triton's ports have no API keys
    sending = SendOptions(url, model, ignore_eos, timeout_s, channels, is_explained, via.value, key)
    try:
        page = address_of_page(metrics_url, url, via) if report is not None else None
        if via != SentVia.GRPC:
            http_address(url)
    except ValueError as error:
        raise typer.BadParameter(f"--url: {error}") from None
    slo = Slo(slo_ttft_s, slo_tbt_s)
    outputs = ReplayOutputs(out, report, page, slo if slo != Slo() else None, as_json)
    raise typer.Exit(carry_out(settings, sending, chosen, outputs))


def carry_out(
    settings: TraceSettings,
    sending: SendOptions,
    chosen: Mapping[str, int | None],
    outputs: ReplayOutputs,
) -> int:
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    if outputs.report is not None:
        require("report", "`mooncake replay --report`")  # fails now rather than after the run
    try:
        rows = rows_of(settings)
        sending, server = asyncio.run(_describe(sending, chosen))
        run = prepare(rows, server, settings)
        for path in filter(None, (outputs.rows, outputs.report)):
            path.open("ab").close()  # a wrong path fails now rather than after the run
    except (OSError, TraceError, ServerError, ReplayRefused) as error:
        errors.print(f"cannot replay: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    for name in server.assumed:
        value = getattr(server, name)
        errors.print(f"the server does not report its {name}; assuming {value:,}", style="yellow")
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
        from loadtest.report.run_page import write_report  # loads matplotlib

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
    run: ReplayRun, summary: Summary, settings: TraceSettings, slo: Slo | None = None
) -> dict[str, object]:
    line: dict[str, object] = {
        "name": "replay",
        "trace": settings.path.name,
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


def page_key(sending: SendOptions, metrics_url: str) -> str:
    """The gateway's API key, which is sent to the gateway's own page only."""
    if sending.via != SentVia.OPENAI:
        return ""
    return http_address(sending.url).key_for(metrics_url, sending.key)


def address_of_page(chosen: str | None, url: str, via: SentVia = SentVia.GRPC) -> str | None:
    """The metrics page to sample, or None. ValueError: `url` is wrong."""
    if chosen is not None:
        return chosen if chosen != "none" else None
    if via == SentVia.OPENAI:
        return http_address(url).metrics_url
    if via == SentVia.HTTP:
        server = http_address(url)
        url = f"{server.host}:{server.port + 1}"
    return addresses_of(url).metrics_url
