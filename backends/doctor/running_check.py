"""Turns the state of a running system and the time of one request into findings with remedies."""

from __future__ import annotations

import email.utils
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from backends.direct_http import DIRECTLY
from backends.doctor.judgement import RATE_WANTED, Finding, broken, note, warning
from backends.errors import Forbidden
from backends.metrics.status.view import Page, parse
from backends.model_settings.running_system import REFUSED, RunningSettings
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError

ASK_S_MAX = 10.0  # timeout in s of a GET from the launcher's metrics port
REQUEST_S_MAX = 60.0  # timeout in s of each read while a request is timed
DIRECTORY_S_MAX = 3.0  # timeout in s of a call to the directory
TTFT_S_WANTED = 2.0  # longest normal time to first token of a prompt of a few tokens
PROMPT = "It is a truth"


@dataclass(frozen=True, slots=True)
class FirstTokenTimed:
    """The result of one request of a few tokens, sent from this process."""

    ttft_s: float = 0.0  # time to the first event of the answer; 0 if there was no event
    problem: str = ""  # why no token was received; "" if a token was received


@dataclass(frozen=True, slots=True)
class RunningFacts:
    settings: RunningSettings
    models: Mapping[str, bool]  # name -> the model is ready
    page: Page  # the metrics page
    clock_skew_s: float  # clock of the launcher's host minus clock of this host
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # worker -> node -> B/s
    request: FirstTokenTimed | None = None  # None: the host has no frontend


def read_running(settings: RunningSettings, metrics_url: str) -> RunningFacts:
    """Raises OSError, ValueError, KeyError or TypeError without a valid answer of the launcher."""
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
            "see the terminal of `mooncake serve` and its logs (.mooncake/logs-*/)",
        )
    else:
        yield Finding("models", f"ready: {', '.join(sorted(facts.models))}")
    for model, state in facts.settings.models.items():
        if state.outcome == REFUSED:
            yield warning(
                "settings",
                f"the newest edit of {model} was refused, the one "
                f"before it stays in use: {state.reason}",
                "mooncake config check",
            )
    for labels in facts.page.labels_of("mooncake_worker_unreached"):
        yield broken(
            "worker",
            f"the frontend cannot call {labels.get('worker', 'one')}",
            "mooncake cluster status names the cause",
        )
    given_up = facts.page.total("mooncake_nixl_agents_given_up_total")
    if given_up:
        yield warning(
            "nixl",
            f"{given_up:.0f} agents froze and are not used any more",
            "restart the workers, one after the other; report it with their logs",
        )
    for worker, rates in facts.rates.items():
        for node, rate in rates.items():
            if rate < RATE_WANTED:
                yield warning(
                    "path",
                    f"{worker} reads node {node} at {rate / 1e6:.0f} MB/s only",
                    "see the path of `mooncake doctor` "
                    "on a quiet host; between hosts look at network and UCX_TLS",
                )
    every = [rate for rates in facts.rates.values() for rate in rates.values()]
    if every and min(every) >= RATE_WANTED:
        yield Finding(
            "path",
            f"workers read storage nodes at {min(every) / 1e9:.2f} to "
            f"{max(every) / 1e9:.2f} GB/s, as measured at their start",
        )
    yield from request_findings(facts.request)
    yield from web_page_findings(facts)


def web_page_findings(facts: RunningFacts) -> Iterator[Finding]:
    """Warn if web pages that the gateway refuses can send prompts to Triton's HTTP port."""
    settings = facts.settings
    refuses_keyless = facts.request is not None and Forbidden.prefix in facts.request.problem
    if settings.openai and settings.http and not refuses_keyless:
        yield warning(
            "web pages",
            f"the gateway at {settings.openai} refuses web pages of other sites, Triton's HTTP "
            f"port at {settings.http} does not: a page in a browser that reaches it can send it "
            "prompts",
            "use no browser on this host, or serve with --api-keys and `keyless: refused` in it "
            "(docs/threat-model.md)",
        )


def request_findings(request: FirstTokenTimed | None) -> Iterator[Finding]:
    if request is None:
        return
    if Forbidden.prefix in request.problem:
        yield note(
            "request",
            "none was timed: this server serves only requests that come with an API key",
            "time one with a key of yours at the gateway",
        )
    elif request.problem:
        yield broken(
            "request",
            request.problem,
            "mooncake status shows queues and "
            "rejections; the first word of the error says whose fault it is",
        )
    elif request.ttft_s > TTFT_S_WANTED:
        yield warning(
            "request",
            f"first token after {request.ttft_s:.2f} s",
            "mooncake status shows whether it queued; more workers, or a shorter queue",
        )
    else:
        yield Finding("request", f"first token after {1000 * request.ttft_s:.0f} ms")


def timed_request(http: str) -> FirstTokenTimed:
    """Stream one short answer and time the first token. `http`: HOST:PORT of a frontend's HTTP."""
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
    except (OSError, ValueError, HTTPException) as error:
        return FirstTokenTimed(problem=f"no answer: {error}")
    return FirstTokenTimed(problem="the answer ended before its first token")


def _get(url: str) -> tuple[str, float]:
    """(text of the answer, server's clock minus ours in s). An error status also has a text."""
    before_s = time.time()
    try:
        with DIRECTLY.open(url, timeout=ASK_S_MAX) as answer:
            text, dated = answer.read().decode(), answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        text, dated = error.read().decode(), error.headers.get("Date", "")
    middle_s = (before_s + time.time()) / 2
    # A Date header omits the fraction of a second: 0.5 s on average.
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
