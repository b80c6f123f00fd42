"""`mooncake profile`: measure a prefill and a decode worker, fit the conductor's estimates.

    mooncake profile [--url 127.0.0.1:8001] [--out profile.json] [--json]

Without --url a server is started for it and stopped afterwards. Not here: the points and their
timing (measure.py), the file (profile.py).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf import text_format
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tritonclient.grpc import model_config_pb2

from backends.shipped import shipped_repository
from backends.workers.machine_profile import cpu_model
from loadtest.client.metrics_page import counter_sum, fetch_page, series_of
from loadtest.client.protocol import ServerError
from loadtest.client.server import Addresses, describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import FreshSeed, ServerUrl, console, measuring, served
from loadtest.profile.measure import (
    DECODE_POINTS,
    PREFILL_POINTS,
    SSD_FILLED_MAX,
    Measure,
    Room,
    SecondWorkers,
    samples_of,
    serving_of,
    sharing_of,
)
from loadtest.profile.profile import OF_ENGINE, PrefixSources, Profile
from loadtest.replay.prompts import TokenSource
from mooncake_store.records.membership import SSD_SUFFIX

SETTINGS = (*OF_ENGINE, "block_tokens", "chunk_tokens", "slots")
STREAMS_MAX = 24
PUBLISHED_S = 1.5  # workers publish their counters once a second


def profile(
    url: ServerUrl = None,
    prefill: Annotated[str, typer.Option(help="Prefill worker to measure.")] = "prefill_0",
    decode: Annotated[str, typer.Option(help="Decode worker to measure.")] = "decode_0",
    rounds: Annotated[int, typer.Option(min=1, help="Samples are medians over them.")] = 3,
    context_tokens_max: Annotated[
        int, typer.Option(min=256, help="Leave out longer prompts and contexts: quicker.")
    ] = 1_000_000,
    out: Annotated[
        Path | None, typer.Option(help="Write the profile there, as one line of JSON.")
    ] = None,
    seed: FreshSeed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the profile as one line of JSON, not a table.")
    ] = False,
) -> None:
    """Measure how long a worker's prefills and decode steps take, and fit the estimates to it.

    Prefills of fresh prompts on (new tokens, prefix tokens), decode steps on (sequences, context
    tokens), about a minute on the demo model. Send no other requests to the server in this time.
    """
    seed = secrets.randbits(62) if seed is None else seed
    repository = shipped_repository() if url is None else None
    with measuring(), served(url) as addresses:
        found = asyncio.run(
            measure(addresses, repository, (prefill, decode), rounds, seed, context_tokens_max)
        )
    if out is not None:
        out.write_text(found.to_json() + "\n")
        console.print(f"wrote {out}", markup=False)
    if as_json:
        print(found.to_json())
    else:
        show(found)


async def measure(
    addresses: Addresses,
    repository: Path | None,
    workers: tuple[str, str],
    rounds: int,
    seed: int,
    context_tokens_max: int,
) -> Profile:
    """`repository`: None if the server was started elsewhere. Raises ServerError."""
    prefill, decode = workers
    of_decode = settings_of(addresses, repository, decode)
    # Memory and slots are those of decode.
    settings = settings_of(addresses, repository, prefill) | of_decode
    async with TritonClient(addresses.grpc, "conductor", channels=STREAMS_MAX) as client:
        server = await describe_server(client, {})
        room = Room(
            min(server.context_tokens_max, context_tokens_max),
            server.block_tokens,
            int(of_decode.get("slots", 32)),
            int(of_decode["kv_pages"]),
        )
        prefills = [point for point in PREFILL_POINTS if room.takes_prefill(*point)]
        decodes = [point for point in DECODE_POINTS if room.takes_decode(*point)]
        source = TokenSource.of_server(server, seed)
        pair = Measure(client, workers, source)
        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(prefill, total=(rounds + 1) * len(prefills))
            prompts = await pair.prefill(prefills, rounds, lambda: progress.advance(task))
            task = progress.add_task(decode, total=rounds * len(decodes))
            steps = await pair.decode(decodes, rounds, lambda: progress.advance(task))
            task = progress.add_task("both at once", total=rounds)
            second = second_workers(fetch_page(addresses.metrics_url), workers)
            both = await pair.together(room, second, rounds, lambda: progress.advance(task))
            task = progress.add_task("bursts", total=rounds)
            burst = await pair.burst(room, rounds, lambda: progress.advance(task))
            task = progress.add_task("other sources of a prefix", total=1)
            token_bytes = token_bytes_of(fetch_page(addresses.metrics_url), decode, room)
            sources = await _sources(pair, addresses, workers, token_bytes, room, rounds)
    settings |= {"block_tokens": str(room.block_tokens), "token_bytes": str(token_bytes)}
    url = addresses.grpc
    if is_local(url):
        settings["cores"] = str(os.cpu_count() or 1)
    machine = f"{cpu_model()}, {os.cpu_count()} cores" if is_local(url) else url
    alone_s = min(step.seconds for step in steps)
    samples, serving = samples_of(prompts), serving_of(prompts, alone_s)
    return Profile(machine, settings, samples, steps, serving, sharing_of(both), burst, sources)


def token_bytes_of(page: str, worker: str, room: Room) -> int:
    """Bytes of KV of one token, from the worker's memory and its pages."""
    kv_bytes = counter_sum(page, "mooncake_kv_bytes_max", {"model": worker}) or 0.0
    pages = counter_sum(page, "mooncake_pages_max", {"model": worker}) or 1.0
    return round(kv_bytes / pages / room.block_tokens)


async def _sources(
    pair: Measure,
    addresses: Addresses,
    workers: tuple[str, str],
    token_bytes: int,
    room: Room,
    rounds: int,
) -> PrefixSources:
    """Measure another node, if the server has a second prefill worker, and the SSD, if it has one
    and the DRAM before it is small enough to be filled."""
    page = fetch_page(addresses.metrics_url)
    node_rate, ssd_rate, path = 0.0, 0.0, ""
    if other := second_workers(page, workers).prefill:
        node_rate = await pair.from_node(other, token_bytes, room, rounds)
        await asyncio.sleep(PUBLISHED_S)
        path = path_of(page, fetch_page(addresses.metrics_url), workers[0]) if node_rate else ""
    sizes = {labels["node"]: size for labels, size in _gauges(page, "mooncake_store_bytes_max")}
    memory_bytes = max((n for node, n in sizes.items() if not node.endswith(SSD_SUFFIX)), default=0)
    has_ssd = any(node.endswith(SSD_SUFFIX) for node in sizes)
    if has_ssd and memory_bytes <= SSD_FILLED_MAX:
        ssd_rate = await pair.from_ssd(round(memory_bytes), token_bytes, room)
    return PrefixSources(node_rate, path, ssd_rate)


def second_workers(page: str, workers: tuple[str, str]) -> SecondWorkers:
    """The first worker of each role besides `workers`, by the series that only this role has."""

    def other(series: str, own: str) -> str:
        names = {labels["model"] for labels, _ in _gauges(page, series)}
        return min(names - {own}, default="")

    prefill, decode = workers
    return SecondWorkers(
        other("mooncake_queue_tokens", prefill), other("mooncake_context_tokens", decode)
    )


def path_of(before: str, after: str, worker: str) -> str:
    """The transport by which the worker read most bytes between two metrics pages."""

    def read(page: str) -> Counter[str]:
        found = Counter[str]()
        for labels, size in _gauges(page, "mooncake_transfer_bytes_total"):
            if labels["model"] == worker and labels["direction"] == "read":
                found[labels["transport"]] += round(size)
        return found

    moved = read(after) - read(before)
    del moved["mapped"]  # memory of the own node, which everything is read from in the end
    return max(moved, key=lambda transport: moved[transport], default="mapped")


def _gauges(page: str, name: str) -> list[tuple[Mapping[str, str], float]]:
    lines = (line for line in page.splitlines() if line.startswith(name))
    return [(one.labels, one.value) for one in series_of(lines) if one.name == name]


def settings_of(addresses: Addresses, repository: Path | None, worker: str) -> dict[str, str]:
    """The worker's number of pages, from the metrics page, and the engine's parameters in its
    config.pbtxt, if the repository is known."""
    pages = counter_sum(fetch_page(addresses.metrics_url), "mooncake_pages_max", {"model": worker})
    if pages is None:
        raise ServerError("unavailable", f"{addresses.metrics_url} knows no worker {worker}")
    settings = {"kv_pages": f"{pages:.0f}"}
    if repository is not None:
        text = (repository / worker / "config.pbtxt").read_text()
        found = text_format.Parse(text, model_config_pb2.ModelConfig()).parameters
        settings |= {name: found[name].string_value for name in SETTINGS if name in found}
    return settings


def is_local(url: str) -> bool:
    return url.rpartition(":")[0] in ("127.0.0.1", "localhost")


def show(found: Profile) -> None:
    """Print every sample beside its fit, then the formulas."""
    table = Table(title=f"{found.machine}")
    for column in ("step", "tokens", "behind", "measured ms", "fitted ms", "error"):
        table.add_column(column, justify="left" if column == "step" else "right")
    prefill, decode = found.prefill, found.decode
    for of_prompt in sorted(found.prefill_samples, key=lambda s: (s.prefix_tokens, s.new_tokens)):
        fitted_s = found.prompt_s(of_prompt.new_tokens, of_prompt.prefix_tokens)
        tokens = (f"{of_prompt.new_tokens:,}", f"{of_prompt.prefix_tokens:,}")
        table.add_row("prefill", *tokens, *_compared(of_prompt.seconds, fitted_s))
    table.add_section()
    for of_batch in found.decode_samples:
        fitted_s = decode.estimate.step_s(of_batch.sequences, of_batch.context_tokens)
        tokens = (f"{of_batch.sequences:,}", f"{of_batch.context_tokens:,}")
        table.add_row("decode", *tokens, *_compared(of_batch.seconds, fitted_s))
    out = Console(highlight=False)
    out.print(table)
    burst, lines = found.burst, []
    base_s, per_token_s, per_pair_s = prefill.estimate.coefficients
    lines.append(
        f"prefill step = {base_s * 1e3:.3g} ms + {per_token_s * 1e6:.4g} us x new"
        f" + {per_pair_s * 1e9:.4g} ns x new x (prefix + new / 2)"
        f"; error {prefill.error_mean:.1%}, worst {prefill.error_max:.1%}"
    )
    base_s, per_sequence_s, per_token_s = decode.estimate.coefficients
    lines.append(
        f"decode step = {base_s * 1e3:.3g} ms + {per_sequence_s * 1e3:.3g} ms x sequences"
        f" + {per_token_s * 1e9:.4g} ns x context"
        f"; error {decode.error_mean:.1%}, worst {decode.error_max:.1%}"
    )
    lines.append(
        f"serving = {found.serving.base_s * 1e3:.3g} ms"
        f" + {found.serving.per_cached_token_s * 1e6:.3g} us x cached, before the first token;"
        f" {found.serving.handover_s * 1e3:.3g} ms between it and the second"
    )
    lines.append(
        f"at the same time: a prefill step takes {found.sharing.prefill:.2f} x as long beside"
        f" decoding, a decode step {found.sharing.decode:.2f} x beside a prefill"
        f"; beside a second worker of its role a prefill step {found.sharing.second_prefill:.2f} x"
        f" and a decode step {found.sharing.second_decode:.2f} x"
    )

    lines.append(
        f"{len(burst.prompt_tokens)} prompts at once: first token after"
        f" {burst.ttft_s * 1e3:.0f} ms, the second {burst.first_interval_s * 1e3:.3g} ms later,"
        f" then every {burst.step_s * 1e3:.3g} ms, on average"
    )
    for line in lines:
        out.print(line, soft_wrap=True)
    sources = found.sources
    rates = (
        (f"another node by {sources.node_path}", sources.node_bytes_per_s),
        ("the SSD", sources.ssd_bytes_per_s),
    )
    for source, rate in rates:
        if rate:
            out.print(f"a prefix comes from {source} at {rate / 1e6:,.0f} MB/s")


def _compared(measured_s: float, fitted_s: float) -> tuple[str, str, str]:
    error = fitted_s / measured_s - 1.0
    return f"{measured_s * 1e3:.2f}", f"{fitted_s * 1e3:.2f}", f"{error:+.1%}"
