"""What the status page shows, looked at once a second however many look at it.

    metrics    what `mooncake status --json` says (backends/metrics/status/view.py); null without
    cluster    what the frontend knows of it (backends/frontend/decisions/fields.py); null without
    history    figures of the last ten minutes (backends/metrics/status/history.py)
    problems   why something is not there

Not here: what a key may see of it (`shown_to`, below, and docs/reference/status-page.md), the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.direct_http import CALL_FAILED
from backends.metrics.status.history import EVERY_S
from backends.metrics.status.readings import RECENT_S, NoStatus, Readings, fetch, fetch_page
from backends.metrics.status.view import View
from backends.statuses import HttpRefusal
from backends.tenants import ApiTenant

FRESH_S = 1.0
FORGOTTEN_S = 2 * RECENT_S  # nobody looked for so long: what was read before is not recent


@dataclass(frozen=True, slots=True)
class StatusReading:
    """Of one moment, as an operator sees it."""

    metrics: View | None = None
    cluster: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


class LiveStatus:
    """Of one event loop. `describe` asks the frontend; `metrics_url`: "" when there is no page of
    the whole system."""

    def __init__(self, metrics_url: str, describe: Callable[[], Awaitable[bytes]]) -> None:
        self._metrics_url, self._describe = metrics_url, describe
        self._readings = Readings()
        self._looking = asyncio.Lock()
        self._seen = StatusReading()
        self._history: list[dict[str, Any]] = []
        self._history_s = float("-inf")  # when it was read
        self._seen_s = float("-inf")
        self.looks = 0

    async def now(self) -> StatusReading:
        """At most FRESH_S old. Who comes while it is looked waits for what is seen."""
        async with self._looking:
            if time.monotonic() - self._seen_s >= FRESH_S:
                self._seen = await self._look()
                self._seen_s = time.monotonic()
        return self._seen

    async def _look(self) -> StatusReading:
        self.looks += 1
        problems: list[str] = []
        metrics, cluster = await asyncio.gather(self._metrics(problems), self._cluster(problems))
        if metrics is not None and time.monotonic() - self._history_s >= EVERY_S:
            await self._read_history()
        return StatusReading(metrics, cluster, problems, self._history)

    async def _read_history(self) -> None:
        """Without an answer, the history stays as it is."""
        url = self._metrics_url.removesuffix("/metrics") + "/history"
        with suppress(*CALL_FAILED, msgspec.DecodeError, KeyError):
            body = await asyncio.to_thread(fetch_page, url)
            self._history = msgspec.json.decode(body)["points"]
            self._history_s = time.monotonic()

    async def _metrics(self, problems: list[str]) -> View | None:
        if not self._metrics_url:
            problems.append("this gateway was started without --metrics: workers have no numbers")
            return None
        try:
            read = await asyncio.to_thread(fetch, self._metrics_url)
        except NoStatus as problem:
            self._readings.clear()
            problems.append(str(problem))
            return None
        if time.monotonic() - self._seen_s > FORGOTTEN_S:
            self._readings.clear()
        self._readings.add(read)
        return self._readings.view(time.time())

    async def _cluster(self, problems: list[str]) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = msgspec.json.decode(await self._describe())
        except (HttpRefusal, msgspec.MsgspecError) as problem:
            problems.append(f"the frontend does not describe the cluster: {problem}")
            return None
        return found


def shown_to(reading: StatusReading, tenant: ApiTenant | None) -> dict[str, Any]:
    """`tenant`: of the key; None where there are no keys, and everybody is an operator."""
    is_operator = tenant is None or tenant.is_operator
    cluster = reading.cluster
    if cluster is not None and tenant is not None and not is_operator:
        own = [each for each in cluster["decisions"] if each["tenant"] == tenant.name]
        cluster = {**cluster, "decisions": own, "hot_prefixes": None}
    return {
        "asker": {"tenant": tenant.name if tenant else None, "is_operator": is_operator},
        "metrics": reading.metrics,
        "cluster": cluster,
        "history": reading.history,
        "problems": reading.problems,
    }
