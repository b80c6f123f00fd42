"""The order of the measurement: the searches on (a), then every system in each round.

A system is started anew for each round, so its caches of KV are empty. It serves the cells of the
round one after the other; prompts of two cells share nothing (traces.py). The systems change their
order from round to round. vLLM's own P/D has one round.

Not here: commands (systems.py), processes (servers.py), numbers (summary.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.headline import capacity, traces
from bench.headline.client import send
from bench.headline.goodput import IdleTimes, RequestDetail, good_share
from bench.headline.resume import CellKey, MeasuredCell, ResumeFolder, details_of
from bench.headline.servers import running
from bench.headline.systems import OPTIONS, Machine, SystemPlan, plan_of
from bench.headline.traces import TraceRequest
from loadtest.harness.server import CannotMeasure, own_ports

CONVERSATION, SYNTHETIC = "conversation", "synthetic"
LIGHT, FULL, HEAVY, FLOOD = 0.5, 1.0, 1.6, 2.5  # times (a)'s capacity
CELLS = (
    (CONVERSATION, LIGHT),
    (CONVERSATION, FULL),
    (CONVERSATION, HEAVY),
    (SYNTHETIC, HEAVY),
    (CONVERSATION, FLOOD),
)
IDLE_LENGTHS = (32, 128, 256, 512, 1_024, 2_048, 4_096, 7_168)
IDLE_REPEATS, IDLE_OUTPUT_TOKENS = 3, 16
START_S, CLIENT_S = 75.0, 25.0  # assumed before measured: a start, a client beside its trace
FIRST_SEARCH_CELL = 1_000  # cell numbers of the searches, whose prompts are no round's


def run_keys(systems: Sequence[str], rounds: int) -> list[CellKey]:
    """All cells in the order in which they are run."""
    found = []
    for number in range(rounds):
        turn = number % max(1, len(systems))
        for system in (*systems[turn:], *systems[:turn]):
            if system != "vllm-pd" or number == 0:
                found += [CellKey(number + 1, system, trace, load) for trace, load in CELLS]
    return found


def remaining_s(
    keys: Sequence[CellKey],
    capacity_per_s: float,
    requests_of: Callable[[CellKey], int],
    start_s: Mapping[str, float],
) -> float:
    """Estimated seconds of the cells that are left, starts included."""
    starts = {(key.round, key.system) for key in keys}
    cells = sum(requests_of(key) / (key.load * capacity_per_s) + CLIENT_S for key in keys)
    return cells + sum(start_s.get(system, START_S) for _, system in starts)


@dataclass(slots=True)
class Measurement:
    machine: Machine
    store: ResumeFolder
    requests: Mapping[str, Sequence[TraceRequest]]  # by trace, at 1/s
    light_requests: int  # of a cell at the light load, which takes longest
    progress: Callable[[str], None]  # a line of progress
    start_s: dict[str, float] = field(default_factory=dict)  # of each system's last start
    load_before: float = 0.0  # load average before the last start
    capacity_per_s: float = 0.0
    idle: IdleTimes | None = None

    def run(self, systems: Sequence[str], rounds: int) -> None:
        """Everything that is not in the resume folder yet. A system that fails is reported and
        tried again in the next run; CannotMeasure when (a) cannot be measured."""
        self.search_capacity()
        for system in systems:
            try:
                self.choose(system, OPTIONS.get(system, {}))
            except CannotMeasure as error:  # the rounds may still run, with its first option
                self.progress(f"the search for {system} failed: {error}")
        keys = run_keys(systems, rounds)
        left = self.left(keys)
        self.progress_left(left)
        for key in keys:
            if key in left and not self.store.has(key):
                same = [k for k in left if (k.round, k.system) == (key.round, key.system)]
                self.run_system(key.system, same)
                left = [k for k in left if k not in same]
                self.progress_left(left)

    def left(self, keys: Sequence[CellKey]) -> list[CellKey]:
        return [key for key in keys if not self.store.has(key)]

    def progress_left(self, left: Sequence[CellKey]) -> None:
        seconds = remaining_s(
            left, self.capacity_per_s, lambda key: len(self.requests_of(key)), self.start_s
        )
        self.progress(f"{len(left)} cells left, about {seconds / 60:.0f} minutes")

    def requests_of(self, key: CellKey) -> Sequence[TraceRequest]:
        requests = self.requests[key.trace]
        return requests[: self.light_requests] if key.load == LIGHT else requests

    def run_system(self, system: str, keys: Sequence[CellKey]) -> None:
        """The cells of one round. Cells that were measured before a failure are kept."""
        where = f"round {keys[0].round}, {system}"
        self.progress(f"{where}: starting, load average {os.getloadavg()[0]:.2f}")
        remaining = list(keys)
        try:
            with self.serving(system) as base_url:
                while remaining:
                    self.run_cell(remaining[0], base_url)
                    remaining.pop(0)
        except CannotMeasure as error:
            self.progress(f"{where} failed: {error}")
            if system == "vllm-pd":  # its failure is a result
                for key in remaining:
                    self.store.save(failed_cell(key, self.capacity_per_s, str(error)))

    def run_cell(self, key: CellKey, base_url: str) -> None:
        rate_per_s = key.load * self.capacity_per_s
        number = CELLS.index((key.trace, key.load)) + 1
        began_s = time.perf_counter()
        details = self.send(base_url, self.requests_of(key), rate_per_s, number)
        cell = MeasuredCell(
            key=key,
            rate_per_s=rate_per_s,
            details=tuple(details),
            start_s=round(self.start_s[key.system], 1),
            taken_s=round(time.perf_counter() - began_s, 1),
            load_before=self.load_before,
            load_after=os.getloadavg()[0],
        )
        self.store.save(cell)
        share = good_share(details)
        self.progress(
            f"round {key.round}, {key.system}, {key.trace} at {key.load:g} ({rate_per_s:.2f}/s): "
            f"{share:.0%} good, {cell.taken_s:.0f} s, load average {cell.load_after:.2f}"
        )

    def send(
        self,
        base_url: str,
        requests: Sequence[TraceRequest],
        rate_per_s: float,
        cell: int,
        at_once_max: int | None = None,
    ) -> list[RequestDetail]:
        sent = traces.at_rate(requests, rate_per_s, cell)
        machine, folder = self.machine, self.store.logs / "client"
        found = send(machine.vllm_bin, machine.checkpoint, base_url, sent, folder, at_once_max)
        if not any(detail.is_answered for detail in found):
            self.progress(f"no request was answered; the first: {found[0].error}")
        return found

    def search_capacity(self) -> None:
        """Set the capacity of (a) and its times when idle, from the folder or on one server."""
        tried: dict[float, float] = {
            float(rate): share for rate, share in (self.store.read("capacity") or {}).items()
        }
        requests = self.requests[CONVERSATION]
        idle = self.store.read("idle")
        if idle is None or self._next_rate(tried, idle) is not None:
            self.progress("(a) alone: its times when idle, then its capacity")
            with self.serving("vllm") as base_url:
                if idle is None:
                    probes = traces.probes(IDLE_LENGTHS, IDLE_REPEATS, IDLE_OUTPUT_TOKENS)
                    found = self.send(base_url, probes, 1.0, FIRST_SEARCH_CELL, at_once_max=1)
                    idle = [dataclasses.asdict(detail) for detail in found]
                    self.store.write("idle", idle)
                attainable = capacity.attainable_share(requests, IdleTimes.of(details_of(idle)))
                self.progress(f"idle, (a) answers {attainable:.0%} of the requests within limits")
                while (rate_per_s := self._next_rate(tried, idle)) is not None:
                    number = FIRST_SEARCH_CELL + 1 + len(tried)
                    found = self.send(base_url, requests, rate_per_s, number)
                    tried[rate_per_s] = good_share(found) / attainable
                    self.store.write("capacity", tried)
                    self.progress(f"(a) at {rate_per_s}/s: {tried[rate_per_s]:.0%} of these good")
        self.idle = IdleTimes.of(details_of(idle))
        self.capacity_per_s = capacity.capacity_per_s(tried)
        self.progress(f"(a)'s capacity is {self.capacity_per_s}/s")

    def _next_rate(self, tried: Mapping[float, float], idle: Sequence[Any]) -> float | None:
        times = IdleTimes.of(details_of(idle))
        return capacity.next_rate(tried, capacity.serial_per_s(self.requests[CONVERSATION], times))

    def choose(self, system: str, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Try each option with half of the requests at the heavy load; remember the shares.

        Options of the router share the servers behind it."""
        choices = self.store.read("choices") or {}
        shares: dict[str, float] = choices.setdefault(system, {})
        requests = self.requests[CONVERSATION]
        requests = requests[: max(1, len(requests) // 2)]
        untried = {name: option for name, option in options.items() if name not in shares}
        rate_per_s, ports = HEAVY * self.capacity_per_s, own_ports(6)
        with contextlib.ExitStack() as shared:
            for number, (name, option) in enumerate(untried.items()):
                plan = plan_of(system, self.machine, ports, **option)
                *before, last = plan.stages
                if number == 0:
                    shared.enter_context(self.started(system, SystemPlan(tuple(before), "")))
                with self.started(system, SystemPlan((last,), plan.base_url)):
                    cell = FIRST_SEARCH_CELL + number
                    found = self.send(plan.base_url, requests, rate_per_s, cell)
                shares[name] = good_share(found)
                self.store.write("choices", choices)
                self.progress(f"{system} with {name}: {shares[name]:.0%} good")

    def chosen(self, system: str) -> dict[str, Any]:
        """The best option of the search; the first one before it; empty without options."""
        shares = (self.store.read("choices") or {}).get(system)
        if not shares:
            return dict(next(iter(OPTIONS.get(system, {}).values()), {}))
        return dict(OPTIONS[system][max(shares, key=lambda name: shares[name])])

    @contextlib.contextmanager
    def serving(self, system: str) -> Iterator[str]:
        """The system's base URL until the block ends; raises StartFailed."""
        plan = plan_of(system, self.machine, own_ports(6), **self.chosen(system))
        self.load_before = os.getloadavg()[0]
        with self.started(system, plan) as self.start_s[system]:
            yield plan.base_url

    def started(self, system: str, plan: SystemPlan) -> contextlib.AbstractContextManager[float]:
        return running(plan, self.store.logs / system, self.progress)


def failed_cell(key: CellKey, capacity_per_s: float, why: str) -> MeasuredCell:
    return MeasuredCell(key, key.load * capacity_per_s, (), 0.0, 0.0, 0.0, os.getloadavg()[0], why)
