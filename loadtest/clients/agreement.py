"""Does a client's TTFT agree with the server's own, of the very same requests?

Pure: two figures in, a row and a target out. What lies between the two: the way through Triton's
front end and, through `ensemble`, preprocessing (both before the front's clock starts), and how
soon the client reads. Not here: asking either of them (server_ttft.py, aiperf.py, genai_perf.py).
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
        if self.server.requests == self.report.requests:
            return ""
        return (
            f"the server counted {self.server.requests:.0f} requests, the client reports "
            f"{self.report.requests}: someone else was sending, or some failed"
        )

    @property
    def ratio(self) -> float | None:
        return None if self.doubt else self.report.ttft_ms_mean / self.server.ttft_ms_mean

    def row(self) -> dict[str, Cell]:
        server_ms = self.server.ttft_ms_mean if self.server.requests else None
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
        value = None if self.ratio is None else abs(self.ratio - 1.0)
        return Target(name, value, "<=", DISAGREEMENT_GOAL, self.doubt)
