"""A client's load, its report, and whether its TTFT agrees with the server's.

The frontend's histogram gives the exact mean of the same requests (`_sum` / `_count`), from the
rise of its counters during the run; a histogram has no exact median. A request to the ensemble
passes two more models, one before the frontend's clock starts and one after it stops. Triton's
statistics have their times. The difference between the two figures is the way through Triton's
front end and its Python stub, and the client's delay in reading.

Not here: running a client (aiperf.py, genai_perf.py, curl.py, tensorrt_llm.py, replay.py).
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.clients.call_matrix import CalledServer
from loadtest.client.metrics_page import counter_sum, fetch_page
from loadtest.client.server import Addresses
from loadtest.harness.benchmark import settled
from loadtest.harness.result import Cell, Target
from loadtest.replay.prompts import TokenSource

DISAGREEMENT_GOAL = 0.15
SPECIAL_TOKEN_IDS = range(16)  # the demo's are 0, 1 and 2
HISTOGRAM = "mooncake_ttft_seconds"
GATEWAY = "gateway"  # in a report in place of the model: OpenAI's interface
FRONTEND = "conductor"  # every request passes it, also through the ensemble
ENSEMBLE_ONLY = ("preprocessing", "postprocessing")
SETTLED_S = 1.5  # the server updates its page at least every second
SETTLE_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """The same for every client: fresh prompts, a number of requests at a time, answers of one
    length."""

    addresses: Addresses
    tokenizer: Path  # a Hugging Face folder; the clients count tokens with it
    requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    gateway: CalledServer | None = None  # None: there is none, or its address is unknown


@dataclass(frozen=True, slots=True)
class ClientReport:
    client: str
    model: str
    workload: str
    requests: int
    ttft_ms_mean: float
    ttft_ms_p50: float
    table: str  # as the client printed it

    @classmethod
    def of_export(
        cls, client: str, model: str, workload: str, found: Mapping[str, Any], table: str
    ) -> ClientReport:
        """From the JSON that aiperf and genai-perf write."""
        ttft, requests = found["time_to_first_token"], int(found["request_count"]["avg"])
        return cls(client, model, workload, requests, ttft["avg"], ttft["p50"], table)


def one_after_another(
    client: str, load: ClientLoad, model: str, ttft_s: Callable[[str], float], what: str
) -> ClientReport:
    """For clients without a load generator of their own: `ttft_s` sends one prompt.

    The prompts are random tokens decoded to text, which no server has cached. Encoded again, the
    text has about 15 % more tokens.
    """
    tokenizer = Tokenizer.from_file(str(load.tokenizer / "tokenizer.json"))
    source = TokenSource(tokenizer.get_vocab_size(), SPECIAL_TOKEN_IDS, secrets.randbits(62))
    times_ms = []
    for index in range(load.requests):
        prompt = tokenizer.decode(source.fresh(index, load.input_tokens).tolist())
        times_ms.append(ttft_s(prompt) * 1_000.0)
    mean_ms, p50_ms = statistics.mean(times_ms), statistics.median(times_ms)
    table = f"{what}: mean {mean_ms:.2f} ms, median {p50_ms:.2f} ms"
    return ClientReport(client, model, "synthetic", len(times_ms), mean_ms, p50_ms, table)


@dataclass(frozen=True, slots=True)
class EventSum:
    """A number of events, and their total seconds."""

    count: float = 0.0
    total_s: float = 0.0

    def __sub__(self, before: EventSum) -> EventSum:
        return EventSum(self.count - before.count, self.total_s - before.total_s)


Totals = Mapping[str, EventSum]  # by model, the server's counters so far


def totals(page: str) -> Totals:
    """The counters of a metrics page.

    For the conductor the frontend's TTFT; for the ensemble's other two models their own times:
    preprocessing once a request, postprocessing once a response.
    """

    def counted(model: str, count: str, total: str, seconds: float) -> EventSum:
        labels = {"model": model}
        value = counter_sum(page, total, labels) or 0.0
        return EventSum(counter_sum(page, count, labels) or 0.0, value * seconds)

    requests, micros = "nv_inference_request_success", "nv_inference_request_duration_us"
    found = {model: counted(model, requests, micros, 1e-6) for model in ENSEMBLE_ONLY}
    return {FRONTEND: counted(FRONTEND, f"{HISTOGRAM}_count", f"{HISTOGRAM}_sum", 1.0), **found}


def settled_totals(metrics_url: str) -> Totals:
    return settled(lambda: totals(fetch_page(metrics_url)), SETTLED_S, SETTLE_S_MAX)


def risen(before: Totals, after: Totals) -> Totals:
    """The counts in between."""
    return {model: after[model] - before[model] for model in after}


@dataclass(frozen=True, slots=True)
class Agreement:
    """A client's figures beside the server's counters of its run."""

    report: ClientReport
    server: Totals

    @property
    def doubt(self) -> str:
        """Why the two are not of the same requests; empty when they are."""
        counted = self.server[FRONTEND].count
        if counted == self.report.requests:
            return ""
        return (
            f"the server counted {counted:.0f} requests, the client reports "
            f"{self.report.requests}: someone else was sending, or some failed"
        )

    @property
    def server_ttft_ms(self) -> float | None:
        """None when a model that the requests should have passed counted nothing."""
        models = (FRONTEND, *ENSEMBLE_ONLY) if self.report.model == "ensemble" else (FRONTEND,)
        passed = [self.server[model] for model in models]
        if not all(each.count for each in passed):
            return None
        return sum(each.total_s / each.count for each in passed) * 1_000.0

    @property
    def ratio(self) -> float | None:
        server_ms = self.server_ttft_ms
        return None if self.doubt or not server_ms else self.report.ttft_ms_mean / server_ms

    def row(self) -> dict[str, Cell]:
        server_ms = self.server_ttft_ms
        return {
            "client": self.report.client,
            "model": self.report.model,
            "workload": self.report.workload,
            "requests": self.report.requests,
            "ttft_ms_p50": round(self.report.ttft_ms_p50, 3),
            "ttft_ms_mean": round(self.report.ttft_ms_mean, 3),
            "server_ttft_ms_mean": None if server_ms is None else round(server_ms, 3),
            "client_over_server": None if self.ratio is None else round(self.ratio, 4),
        }

    def target(self) -> Target:
        report = self.report
        name = f"{report.client} {report.model} {report.workload} ttft_disagreement"
        if self.ratio is None:
            why = self.doubt or "the server's own models counted nothing"
            return Target(name, None, "<=", DISAGREEMENT_GOAL, why)
        return Target(name, abs(self.ratio - 1.0), "<=", DISAGREEMENT_GOAL)
