"""`python -m bench.clients`: public clients, unchanged, against a server.

It installs each client into an environment of its own, runs it, prints its table, and compares its
TTFT with the server's. Agent frameworks and tools run against a server with CHECKPOINT, as forced
calls and schemas let a weak model complete their scripts.

Not here: the requests of each client (aiperf.py, genai_perf.py, curl.py, tensorrt_llm.py,
replay.py).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.clients import aiperf, curl, curl_gateway, genai_perf, libraries, replay, tensorrt_llm
from bench.clients.agreement import Agreement, ClientLoad, ClientReport, risen, settled_totals
from bench.clients.call_matrix import CalledServer
from bench.clients.environment import ENVIRONMENTS, ClientFailed, environment
from bench.clients.keyed_gateway import PublicServer, public_server
from bench.clients.libraries import AGENTS, LIBRARIES, CallOutcome, Library, LibraryRun
from bench.clients.replay import ScaledTrace
from loadtest.client.server import Addresses
from loadtest.harness.benchmark import BenchmarkRun, ServerUrl, benchmark
from loadtest.harness.server import PROJECT

REQUIREMENTS = {
    aiperf.NAME: aiperf.REQUIREMENTS,
    genai_perf.NAME: genai_perf.REQUIREMENTS,
    tensorrt_llm.NAME: (),
    curl.NAME: (),
} | {name: library.requirements for name, library in (LIBRARIES | AGENTS).items()}
REPORTED = tuple(name for name, agent in AGENTS.items() if not agent.gates)
CHECKPOINT = "smollm2-135m"
MODELS = ("conductor", "ensemble")
CHATS_AT_A_TIME = 4
WIDTH = 130  # of tables in a file or a pipe
ClientRun = Callable[[], ClientReport]


def installed(clients: Sequence[str], parent: Path, console: Console) -> dict[str, Path]:
    """Client -> the folder of its programs."""
    found: dict[str, Path] = {}
    for client in clients:
        if requirements := REQUIREMENTS[client]:
            with console.status(f"installing {' '.join(requirements)} (up to 1.3 GB) ..."):
                library = (LIBRARIES | AGENTS).get(client)
                made = (
                    library.installed(parent)
                    if library is not None
                    else environment(client, requirements, parent)
                )
            if made.install_s:
                console.print(f"installed {' '.join(requirements)} in {made.install_s:.0f} s")
            found[client] = made.bin
    return found


def runs_of(
    client: str, binaries: Path, load: ClientLoad, out: Path, trace: ScaledTrace
) -> list[ClientRun]:
    """Each client on both models, aiperf and curl through the gateway too; aiperf also with the
    trace, and then our client with the same."""
    if client == aiperf.NAME:
        run = partial(aiperf.run, binaries, load)
        return [
            *(partial(run, model, out / f"aiperf-{model}") for model in MODELS),
            *chats_of_aiperf(binaries, load, out),
            partial(run, MODELS[0], out / "aiperf-trace", trace),
            partial(replay.run, load, MODELS[0], out / "mooncake-replay", trace),
        ]
    if client == genai_perf.NAME:
        run_backend = partial(genai_perf.run, binaries, load)
        return [
            partial(run_backend, model, backend, out / f"{client}-{model}-{backend}")
            for model in MODELS
            for backend in genai_perf.BACKENDS
        ]
    run_one = {tensorrt_llm.NAME: tensorrt_llm.run, curl.NAME: curl.run}[client]
    has_chat = client == curl.NAME and load.gateway is not None
    chats = [partial(curl_gateway.run, load)] if has_chat else []
    return [*(partial(run_one, load, model) for model in MODELS), *chats]


def chats_of_aiperf(binaries: Path, load: ClientLoad, out: Path) -> list[ClientRun]:
    """Once with aiperf's own token counts, once with the server's and more requests at a time."""
    if load.gateway is None:
        return []
    many = replace(load, concurrency=max(CHATS_AT_A_TIME, load.concurrency))
    return [
        partial(aiperf.run_chat, binaries, load, out / "aiperf-chat", False),
        partial(aiperf.run_chat, binaries, many, out / "aiperf-chat-counts", True),
    ]


def compared(run: ClientRun, addresses: Addresses, console: Console) -> Agreement:
    before = settled_totals(addresses.metrics_url)
    with console.status("running ..."):
        report = run()
    title = f"{report.client}, {report.model}, {report.workload}"
    console.print(f"\n== {title}\n{report.table}", markup=False, soft_wrap=True)
    return Agreement(report, risen(before, settled_totals(addresses.metrics_url)))


def called(
    library: Library, binaries: Path, server: CalledServer, folder: Path, console: Console
) -> LibraryRun:
    with console.status(f"{library.name} ..."):
        found = libraries.run(library, binaries, server, folder)
    console.print(f"\n== {found.client}", markup=False)
    for each in found.outcomes:
        console.print(f"# {each.call}\n{each.shown}", markup=False, soft_wrap=True)
    return found


def call_all(
    called_by: Sequence[Library],
    binaries: Mapping[str, Path],
    server: PublicServer,
    folder: Path,
    measured: BenchmarkRun,
    console: Console,
) -> None:
    """The rows of libraries, the targets of those that gate."""
    if server.gateway is None:
        return
    for library in called_by:
        at = folder / library.name
        try:
            found = called(library, binaries[library.name], server.gateway, at, console)
        except ClientFailed as error:
            outcome = CallOutcome("the whole script", "", str(error), "")
            console.print(outcome.shown, markup=False, soft_wrap=True)
            found = LibraryRun(library.name, (outcome,), library.gates)
        measured.rows.append(found.row())
        if found.gates:
            measured.targets.append(found.target())


def show_curl(server: PublicServer, console: Console) -> None:
    shown = [(call, f"http://{server.addresses.http}") for call in curl.CALLS]
    if (gateway := server.gateway) is not None:
        shown += [(call, gateway.url.removesuffix("/v1")) for call in curl_gateway.calls(gateway)]
    for call, base in shown:
        answer = curl.send(call, base)
        text = f"\n# {call.title}\n$ {curl.shown(call, base)}\n{answer.text}"
        console.print(f"{text}\n[status {answer.status}]", markup=False, soft_wrap=True)
        if answer.status not in call.statuses:
            raise ClientFailed(f"{call.title}: status {answer.status}, not {call.statuses}")


def measure(
    runs: Sequence[ClientRun], addresses: Addresses, measured: BenchmarkRun, console: Console
) -> None:
    for run in runs:
        agreement = compared(run, addresses, console)
        measured.rows.append(agreement.row())
        measured.targets.append(agreement.target())


def chosen_clients(
    clients: Sequence[str] | None, url: str | None, openai_url: str | None
) -> list[str]:
    """The chosen clients, by default those that gate; with a running server without a named
    gateway, those that need none."""
    by_default = [name for name in REQUIREMENTS if name not in REPORTED]
    chosen = list(dict.fromkeys(clients or by_default))
    if unknown := set(chosen) - set(REQUIREMENTS):
        names = ", ".join(sorted(unknown))
        raise typer.BadParameter(f"no such client: {names}; choose of {', '.join(REQUIREMENTS)}")
    if openai_url and not url:
        raise typer.BadParameter("--openai-url is of a running server: give --url too")
    if not url or openai_url:
        return chosen
    of_gateway = LIBRARIES | AGENTS
    if clients and (without := [name for name in chosen if name in of_gateway]):
        raise typer.BadParameter(f"{', '.join(without)} want --openai-url beside --url")
    return [name for name in chosen if name not in of_gateway]


def check_scale(length_scale: float, speed: float) -> None:
    for name, value in (("--length-scale", length_scale), ("--speed", speed)):
        if not (math.isfinite(value) and value > 0):
            raise typer.BadParameter(f"{name} is {value}; it must be a positive number")


def main(
    clients: Annotated[
        list[str] | None, typer.Argument(help=f"Which of {', '.join(REQUIREMENTS)}; default: all.")
    ] = None,
    url: ServerUrl = None,
    openai_url: Annotated[
        str | None, typer.Option(help="With --url: its gateway, as http://127.0.0.1:9000.")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each synthetic run.")] = 60,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    input_tokens: Annotated[int, typer.Option(min=8, help="Length of each prompt.")] = 1_024,
    output_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 32,
    trace: Annotated[
        Path, typer.Option(help="A trace in Mooncake's format, for aiperf's fixed schedule.")
    ] = PROJECT / "tests" / "data" / "conversation_turns.jsonl",
    length_scale: Annotated[float, typer.Option(help="As of mooncake replay.")] = 0.25,
    speed: Annotated[float, typer.Option(help="As of mooncake replay.")] = 100.0,
    tokenizer: Annotated[
        Path, typer.Option(help="Hugging Face folder of the served model's tokenizer.")
    ] = PROJECT / "backends" / "demo_checkpoint",
    checkpoint: Annotated[
        str, typer.Option(help="Of the agents' server; `mooncake model list`, or a folder.")
    ] = CHECKPOINT,
    environments: Annotated[
        Path, typer.Option(help="Where the clients are installed, each in its own environment.")
    ] = ENVIRONMENTS,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the clients' own files; default: in /tmp.")
    ] = None,
) -> None:
    """Run public clients, unchanged, and compare the TTFT of load generators with the server's own.

    The last line is one JSON object: a row for each run with its failed calls, or by how much it
    disagrees. The exit status is 1 if a call failed of a client that is not only reported.
    """
    chosen = chosen_clients(clients, url, openai_url)
    check_scale(length_scale, speed)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    scaled = ScaledTrace(trace.resolve(), length_scale, speed)
    with benchmark("clients", console) as measured:
        folder = (out or Path(tempfile.mkdtemp(prefix="mooncake-clients-"))).resolve()
        binaries = installed(chosen, environments, console)
        if rest := [client for client in chosen if client not in AGENTS]:
            with public_server(url, openai_url) as server:
                load = ClientLoad(
                    server.addresses,
                    tokenizer.resolve(),
                    requests,
                    concurrency,
                    input_tokens,
                    output_tokens,
                    server.gateway,
                )
                if curl.NAME in rest:
                    show_curl(server, console)
                for client in rest:
                    at = binaries.get(client, folder)
                    if (library := LIBRARIES.get(client)) is None:
                        runs = runs_of(client, at, load, folder, scaled)
                        measure(runs, load.addresses, measured, console)
                    else:
                        call_all([library], binaries, server, folder, measured, console)
        if agents := [AGENTS[client] for client in chosen if client in AGENTS]:
            with public_server(url, openai_url, checkpoint) as server:
                call_all(agents, binaries, server, folder, measured, console)
        console.print(f"\nfiles of the clients: {folder}")
    if any(row.get("failed") and row["gates"] for row in measured.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
