"""Does a client's TTFT agree with the server's own, of the very same requests?

Pure: two figures in, a row and a target out. What lies between the two: the way through Triton's
front end and its Python stub, and how soon the client reads. Not here: asking either of them
(server_ttft.py, aiperf.py, genai_perf.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.bench.result import Cell, Target
from loadtest.clients.load import Report
from loadtest.clients.server_ttft import Totals

DISAGREEMENT_GOAL = 0.15


@dataclass(frozen=True, slots=True)
class Agreement:
    report: Report
    server: Totals

    @property
    def doubt(self) -> str:
        """Why the two are not about the same requests; empty when they are."""
        if self.server.front.count == self.report.requests:
            return ""
        return (
            f"the server counted {self.server.front.count:.0f} requests, the client reports "
            f"{self.report.requests}: someone else was sending, or some failed"
        )

    @property
    def server_ttft_ms(self) -> float | None:
        return self.server.ttft_ms_mean(self.report.model)

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
