"""Reads the state of a running system, times one request, and turns both into findings."""

from __future__ import annotations

import email.utils
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.direct_http import CALL_FAILED, DIRECTLY
from backends.doctor.judgement import RATE_WANTED, Finding, broken, note, warning
from backends.errors import Forbidden
from backends.metrics.status.view import Page, parse
from backends.model_settings.running_system import REFUSED, RunningSettings
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.process.process_memory import pid_space, pss_bytes

ASK_S_MAX = 10.0  # timeout of a GET from the launcher's metrics port
REQUEST_S_MAX = 60.0  # timeout of each socket read of the timed request's answer
DIRECTORY_S_MAX = 3.0  # timeout of a call to the directory
TTFT_S_WANTED = 2.0  # longest normal time to first token for a prompt of a few tokens
PROMPT = "It is a truth"


@dataclass(frozen=True, slots=True)
class FirstTokenTimed:
    """The result of one request with a few tokens, sent by this process."""

    ttft_s: float = 0.0  # time until the first event of the answer; 0: there was no event
    problem: str = ""  # why no token was received; "" if a token was received


@dataclass(frozen=True, slots=True)
class RunningFacts:
    settings: RunningSettings
    models: Mapping[str, bool]  # name -> whether the model is ready
    page: Page  # the launcher's metrics
    clock_skew_s: float  # clock of the launcher's host minus clock of this host
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # as from `_rates`
    request: FirstTokenTimed | None = None  # None: the launcher has no frontend


def read_running(settings: RunningSettings, metrics_url: str) -> RunningFacts:
    """Without a valid answer, raises OSError, HTTPException, ValueError, KeyError or TypeError."""
    base = metrics_url.removesuffix("/").removesuffix("/metrics")
    ready, skew_s = _get(f"{base}/ready")
    page, _ = _get(f"{base}/metrics")
    models = {each["name"]: each["is_ready"] for each in json.loads(ready)["models"]}
    return RunningFacts(
        settings,
        models,
        parse(page, time.monotonic()),
        skew_s,
        _rates(settings.directory),
        timed_request(settings.http) if settings.http else None,
    )


def running_findings(facts: RunningFacts) -> Iterator[Finding]:
    silent = sorted(name for name, is_ready in facts.models.items() if not is_ready)
    if silent:
        yield broken(
            "models",
            f"not ready: {', '.join(silent)}",
            "see the terminal of `mooncake serve` and the logs in .mooncake/logs-*/",
        )
    else:
        yield Finding("models", f"ready: {', '.join(sorted(facts.models))}")
    for model, state in facts.settings.models.items():
        if state.outcome == REFUSED:
            yield warning(
                "settings",
                f"the newest edit of {model} was refused, so the model keeps its "
                f"previous settings: {state.reason}",
                "mooncake config check",
            )
    for labels in facts.page.labels_of("mooncake_worker_unreached"):
        yield broken(
            "worker",
            f"the frontend cannot call {labels.get('worker', 'a worker')}",
            "mooncake cluster status names the cause",
        )
    given_up = facts.page.total("mooncake_nixl_agents_given_up_total")
    if given_up:
        yield warning(
            "nixl",
            f"{given_up:.0f} NIXL agents of this system froze and are not used any more",
            "restart the workers, one after the other, and report the case with their logs",
        )
    for worker, rates in facts.rates.items():
        for node, rate in rates.items():
            if rate < RATE_WANTED:
                yield warning(
                    "path",
                    f"{worker} reads node {node} at only {rate / 1e6:.0f} MB/s",
                    "on one host, see the path findings when the host is quiet; "
                    "between hosts, check the network and UCX_TLS",
                )
    every = [rate for rates in facts.rates.values() for rate in rates.values()]
    if every and min(every) >= RATE_WANTED:
        yield Finding(
            "path",
            f"workers read storage nodes at {min(every) / 1e9:.2f} to "
            f"{max(every) / 1e9:.2f} GB/s, measured when the workers started",
        )
    yield from memory_findings(facts.settings)
    yield from request_findings(facts.request)
    yield from web_page_findings(facts)


def memory_findings(settings: RunningSettings) -> Iterator[Finding]:
    """The memory of the running system, if its processes are on this host."""
    if settings.pid_space != pid_space():
        return
    try:
        found = pss_bytes(settings.processes)
    except PermissionError:
        yield note(
            "memory",
            "the processes of the running system belong to another user",
            "run `mooncake doctor` as that user",
        )
        return
    kinds = sorted(found.items(), key=lambda kind: -kind[1])
    parts = ", ".join(f"{kind} {size / 2**20:,.0f}" for kind, size in kinds)
    total = sum(found.values()) / 2**20
    yield Finding("memory", f"all processes hold {total:,.0f} MiB (sum of PSS): {parts}")


def web_page_findings(facts: RunningFacts) -> Iterator[Finding]:
    """Warn if Triton's HTTP port accepts prompts of web pages that the gateway refuses."""
    settings = facts.settings
    refuses_keyless = facts.request is not None and Forbidden.prefix in facts.request.problem
    if settings.openai and settings.http and not refuses_keyless:
        yield warning(
            "web pages",
            f"the gateway at {settings.openai} refuses requests of other sites' web pages, but "
            f"Triton's HTTP port at {settings.http} does not: a page in a browser that reaches the "
            "port can send prompts",
            "use no browser on this host, or serve with --api-keys and a file with `keyless: "
            "refused` (docs/threat-model.md)",
        )


def request_findings(request: FirstTokenTimed | None) -> Iterator[Finding]:
    if request is None:
        return
    if Forbidden.prefix in request.problem:
        yield note(
            "request",
            "no request was timed, because this server serves only requests with an API key",
            "time a request with an API key at the gateway",
        )
    elif request.problem:
        yield broken(
            "request",
            request.problem,
            "`mooncake status` shows queues and rejections; the frontend's log may have the cause",
        )
    elif request.ttft_s > TTFT_S_WANTED:
        yield warning(
            "request",
            f"first token after {request.ttft_s:.2f} s",
            "`mooncake status` shows whether requests queue; if so, add workers or reduce the load",
        )
    else:
        yield Finding("request", f"first token after {1000 * request.ttft_s:.0f} ms")


def timed_request(http: str) -> FirstTokenTimed:
    """Stream a short answer and time its first token. `http`: HOST:PORT of the frontend."""
    body = {"text_input": PROMPT, "max_tokens": 4, "stream": True}
    asked = urllib.request.Request(
        f"http://{http}/v2/models/conductor/generate_stream", json.dumps(body).encode()
    )
    started_s = time.monotonic()
    try:
        with DIRECTLY.open(asked, timeout=REQUEST_S_MAX) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    said: dict[str, Any] = json.loads(line[5:])
                    seconds = time.monotonic() - started_s
                    return FirstTokenTimed(seconds, str(said.get("error", "")))
    except urllib.error.HTTPError as error:
        return FirstTokenTimed(problem=f"status {error.code}: {error.read(500).decode()}")
    except (*CALL_FAILED, ValueError) as error:
        return FirstTokenTimed(problem=f"no answer: {error}")
    return FirstTokenTimed(problem="the answer ended before its first token")


def _get(url: str) -> tuple[str, float]:
    """(body of the answer, also with an error status; server's clock minus this host's in s)."""
    before_s = time.time()
    try:
        with DIRECTLY.open(url, timeout=ASK_S_MAX) as answer:
            text, dated = answer.read().decode(), answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        text, dated = error.read().decode(), error.headers.get("Date", "")
    middle_s = (before_s + time.time()) / 2
    # A Date header omits the fraction of a second, which is 0.5 s on average.
    there = email.utils.parsedate_to_datetime(dated).timestamp() + 0.5 if dated else middle_s
    return text, there - middle_s


def _rates(directory: str) -> dict[str, dict[str, float]]:
    """Worker -> node -> bytes/s, measured when the worker started. {} if no directory answers."""
    if not directory:
        return {}
    try:
        with DirectoryClient(directory, timeout_s=DIRECTORY_S_MAX) as client:
            return {
                worker.worker_id: dict(worker.transfer_bytes_per_s)
                for worker in client.snapshot().workers
            }
    except StoreError:
        return {}
