"""`mooncake doctor`: checks host, model repository and running system, and prints findings."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from backends.cluster.rendered_folder import is_rendered
from backends.config_pbtxt import WorkerConfig
from backends.direct_http import CALL_FAILED
from backends.doctor.host_facts import read_host
from backends.doctor.judgement import (
    BROKEN,
    Finding,
    broken,
    host_findings,
    note,
    skew_findings,
    vllm_findings,
)
from backends.doctor.running_check import read_running, running_findings
from backends.doctor.transfer_probe import probe
from backends.doctor.trtllm_contract import contract_findings
from backends.doctor.vllm_interpreter import read_interpreters
from backends.errors import ConfigError
from backends.launcher import environment
from backends.launcher.command import STORE_BYTES, StorageNodes, StoreBytes
from backends.launcher.launch import TRITON_SHM_BYTES
from backends.metrics.status.readings import DEFAULT_METRICS_URL
from backends.model_settings.checkpoint_facts import facts_beside
from backends.model_settings.model_file import ModelFile, read_model_file
from backends.model_settings.repository_check import check_repository
from backends.model_settings.repository_files import read_texts, versionless
from backends.model_settings.running_system import RunningSettings, ask_at, named_or_served
from backends.shipped import DEFAULT_REPOSITORY
from mooncake_store.cli.arguments import parse_bytes, parse_nodes
from mooncake_store.cli.serving import UNIT_BYTES

console = Console(highlight=False)
STYLES = {"BROKEN": "bold red", "warning": "yellow", "note": "dim", "ok": "green"}
THREADS_WANTED = 500  # threads of all processes of `mooncake serve`


def doctor(
    model_repository: Annotated[
        Path, typer.Option(help="The folder of models that `serve` has.")
    ] = DEFAULT_REPOSITORY,
    metrics_url: Annotated[
        str, typer.Option(help="The metrics page of the running system, if there is one.")
    ] = DEFAULT_METRICS_URL,
    http_port: Annotated[int, typer.Option(help="KServe HTTP port of the next start.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="KServe gRPC port of the next start.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port of the next start.")] = 8002,
    openai_port: Annotated[
        int, typer.Option(help="OpenAI's interface of the next start; 0: none.")
    ] = 0,
    nodes: StorageNodes = "s0,s1",
    store_bytes: StoreBytes = STORE_BYTES,
    engine: Annotated[
        str,
        typer.Option(
            help="tensorrt_llm: compare this package with what Mooncake uses of it, and do nothing "
            "else."
        ),
    ] = "",
    sources: Annotated[
        Path | None,
        typer.Option(
            help="As --engine tensorrt_llm, with a folder of the package's sources instead of the "
            "installed package. Its kv_cache_connector.py is executed."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """Check whether this host can serve and whether a running system works, and print remedies.

    The command takes some seconds, because it starts storage nodes to measure transfers. The exit
    status is 1 if a finding is BROKEN.
    """
    if engine or sources:
        if engine not in ("tensorrt_llm", ""):
            raise typer.BadParameter(f"is {engine!r}; use tensorrt_llm", param_hint="--engine")
        show(list(contract_findings(sources)), as_json)
    named = parse_nodes(nodes)
    ask = ask_at(metrics_url)
    running, model_repository = ask(), named_or_served(model_repository, ask)
    findings: list[Finding] = []
    texts: dict[str, str] = {}
    try:
        texts = read_texts(model_repository)
        known = tuple(running.nodes) if running is not None else named
        findings += repository_findings(model_repository, texts, known)
    except ConfigError as error:
        findings.append(note("model repository", str(error), "mooncake init my-models"))
    files = worker_files(texts)
    devices = {
        file.model: file.value("device", WorkerConfig().device)
        for file in files
        if file.value("engine", WorkerConfig().engine) == "torch"
    }
    threads = sum(
        int(file.value("threads", 1)) for file in files if file.value("threads", 1).isdecimal()
    )
    needed_bytes = (
        len(named) * parse_bytes(store_bytes, "--store-bytes", UNIT_BYTES) + TRITON_SHM_BYTES
    )
    if running is None:
        ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
        ports |= {"openai": openai_port} if openai_port else {}
        findings += start_findings(ports, needed_bytes)
    facts = read_host(devices, threads, 0 if running is not None else needed_bytes)
    findings += host_findings(facts, probe())
    findings += vllm_findings(read_interpreters(files, model_repository))
    findings += system_findings(running, metrics_url)
    show(findings, as_json)


def show(findings: Sequence[Finding], as_json: bool) -> NoReturn:
    """Print the findings, and exit."""
    is_broken = any(each.state == BROKEN for each in findings)
    if as_json:
        answer = {"findings": [asdict(each) for each in findings], "is_well": not is_broken}
        console.file.write(json.dumps(answer) + "\n")
    else:
        for each in findings:
            console.print(str(each), style=STYLES[each.state], markup=False, soft_wrap=True)
    sys.exit(is_broken)


def repository_findings(
    repository: Path, texts: Mapping[str, str], nodes: Sequence[str]
) -> Iterator[Finding]:
    known = None if is_rendered(repository) else nodes
    found = check_repository(texts, facts_beside(repository), known, versionless(repository, texts))
    for mistake in found.mistakes:
        yield broken("model repository", mistake, "edit it, or use `mooncake config set`")
    if not found.mistakes:
        yield Finding("model repository", f"{repository}: {len(texts)} models")


def worker_files(texts: Mapping[str, str]) -> list[ModelFile]:
    """The readable config.pbtxt files of workers. `repository_findings` reports the others."""
    found = []
    for model, text in texts.items():
        with contextlib.suppress(ConfigError):
            found.append(read_model_file(model, text))
    return [file for file in found if file.is_worker]


def start_findings(ports: dict[str, int], shm_bytes: int) -> Iterator[Finding]:
    """A finding for each problem that would prevent a start of `mooncake serve`."""
    try:
        triton = environment.find_triton()
    except environment.EnvironmentProblem:
        return  # version_findings reports the missing Triton
    addresses = {name: ("127.0.0.1", port) for name, port in ports.items()}
    found = list(environment.problems(triton, addresses, shm_bytes, THREADS_WANTED))
    for problem in found:
        yield broken("start", problem, "after that, `mooncake serve` can start")
    if not found:
        free = ", ".join(map(str, ports.values()))
        yield Finding("start", f"nothing prevents it; the ports {free} are free")


def system_findings(running: RunningSettings | None, metrics_url: str) -> Iterator[Finding]:
    if running is None:
        yield note(
            "running system",
            f"none answers at {metrics_url}",
            "start one with `mooncake serve`, or name another with --metrics-url",
        )
        return
    try:
        facts = read_running(running, metrics_url)
    except (*CALL_FAILED, ValueError, KeyError, TypeError) as error:
        yield broken(
            "running system",
            f"{metrics_url} gives no valid answer: {error}",
            "see the terminal of `mooncake serve`",
        )
        return
    yield from skew_findings(metrics_url, facts.clock_skew_s)
    yield from running_findings(facts)
