"""Does anything grow, or stay behind? Locust for minutes, then mixed requests, one server.

    python -m bench.leaks [--seconds 300] [--users 20] [--mixed 1000]
    python -m bench.leaks --seconds 3600 --capacity-share 0.8

Every process of its server checks its invariants each second, and exits when one is broken. Storage
nodes, and the blocks whose hits the conductor counts, are small so that they are full after a
minute.

    warm_up  mixed requests, more at once than later: they fill thread pools and open connections.
    pace     with `--capacity-share` only: the rate of answers without think time, and the think
             time at which users request this share of it. The rate is measured again after the
             load, because the speed of a shared machine changes.
    load     Locust's users of the default mix for `--seconds`. Of each process the medians of the
             last minute are compared with those of the second minute (the first one fills the
             store): resident memory, threads, file descriptors.
    mixed    good, wrong and abandoned requests in random order, over gRPC and HTTP; threads and
             descriptors of the idle server are compared before and after.

After each phase no request, page, slot or lease may be held, by the server's own metrics.

Not here: reading processes (bench/harness/processes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import requests
import typer

from backends.metrics.table import METRICS, OUTCOMES
from bench.harness.processes import Look, Looks, ProcessWatch
from loadtest.client.metrics_page import SETTLE_S, counter_sum, fetch_page, series_key, series_of
from loadtest.client.protocol import GenerateRequest, Rejected, ServerError
from loadtest.client.server import Addresses, describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import PROJECT, CannotMeasure, own_repository, started

RSS_RATIO_GOAL = 1.03
WINDOW_S = 60.0
REST_S_MAX = 20.0
PACE_S = 90.0  # seconds of users, to measure their rate of answers
PACE_SLACK = 0.95  # least answered share of the requested rate: users and machine are random
IN_FLIGHT_MAX = 24
REST, MINUTES = ("before", "after"), ("second", "last")
SELF_CHECKS = "mooncake_self_checks_total"
STORE_BYTES = "96M"
HOT_KEYS_MAX = 2_048
LOCUST_FILE = PROJECT / "loadtest" / "locustfile.py"
HTTP_S_MAX = 120.0
SHARES = {"good": 5, "good http": 1, "bad": 2, "left": 2, "left http": 1}
WAYS_TO_BE_WRONG = (
    {"input_ids": np.array([1, 2, 10**6], np.int32)},
    {"input_ids": np.array([5, -1], np.int32)},
    {"max_tokens": 0},
    {"max_tokens": 10**6},
    {"temperature": -1.0},
    {"top_p": 2.0},
    {"parameters": {"no_such_parameter": 1}},
    {"parameters": {"prefill_worker": "prefill_99"}},
    {"input_ids": None, "text_input": ""},
)


@dataclass(frozen=True, slots=True)
class ComparedMinutes:
    """The two compared minutes, by the clock of the looks."""

    second: tuple[float, float]
    last: tuple[float, float]


def within(looks: Looks, window: tuple[float, float]) -> Looks:
    return {
        process: [look for look in seen if window[0] <= look.time_s <= window[1]]
        for process, seen in looks.items()
    }


def load_rows(looks: Looks, windows: ComparedMinutes) -> list[dict[str, Cell]]:
    """Medians of both windows. A process that was not in both has no ratio."""
    early, late = within(looks, windows.second), within(looks, windows.last)
    rows = rows_of("load", early, late, MINUTES, ("rss_mib", "threads", "descriptors"))
    for process, row in rows.items():
        is_whole = bool(early[process] and late[process])
        row["rss_ratio"] = (
            round(_rss(late[process]) / _rss(early[process]), 4) if is_whole else None
        )
    return list(rows.values())


def _rss(looks: Sequence[Look]) -> float:
    return float(statistics.median(look.rss_bytes for look in looks))


def rest_rows(phase: str, before: Looks, after: Looks) -> list[dict[str, Cell]]:
    """Rows around a phase; each idle process is looked at once."""
    return list(rows_of(phase, before, after, REST, ("threads", "descriptors")).values())


def rows_of(
    phase: str, before: Looks, after: Looks, when: tuple[str, str], columns: Sequence[str]
) -> dict[tuple[str, int], dict[str, Cell]]:
    """By process: the medians of its looks in either window."""
    rows: dict[tuple[str, int], dict[str, Cell]] = {}
    for process in sorted(before.keys() | after.keys()):
        windows = {when[0]: before.get(process, ()), when[1]: after.get(process, ())}
        if not any(windows.values()):
            continue  # a helper process that exists in neither window
        row: dict[str, Cell] = {"phase": phase, "process": process[0], "pid": process[1]}
        for column in columns:
            for name, seen in windows.items():
                values = [getattr(look, column) for look in seen]
                row[f"{column}_{name}"] = round(statistics.median(values), 2) if values else None
        rows[process] = row
    return rows


def _doubt(rows: Sequence[Mapping[str, Cell]], *columns: str) -> str:
    """Why the rows do not prove growth: a process started or ended in between. Empty when they
    do.
    """
    if not rows:
        return "no process was found"
    short = [
        f"{row['process']} ({row['pid']})"
        for row in rows
        if any(row[column] is None for column in columns)
    ]
    return f"started or ended in between: {', '.join(short)}" if short else ""


def growth_targets(
    phase: str, rows: Sequence[Mapping[str, Cell]], first: str, then: str
) -> list[Target]:
    """The process that grew most between two looks; null when one started or ended in between."""
    targets = []
    for what in ("threads", "descriptors"):
        before, after = f"{what}_{first}", f"{what}_{then}"
        if why := _doubt(rows, before, after):
            targets.append(Target(f"{phase}_{what}_grown", None, "<=", 0, why))
            continue
        grown = {str(row["process"]): _number(row[after]) - _number(row[before]) for row in rows}
        name, most = max(grown.items(), key=lambda item: item[1])
        why = f"{name}, among others" if most > 0 else ""
        targets.append(Target(f"{phase}_{what}_grown", most, "<=", 0, why))
    return targets


def rss_target(rows: Sequence[Mapping[str, Cell]]) -> Target:
    """The process whose memory grew most under load."""
    name = "load_rss_last_over_second"
    if why := _doubt(rows, "rss_ratio"):
        return Target(name, None, "<=", RSS_RATIO_GOAL, why)
    worst = max(rows, key=lambda row: _number(row["rss_ratio"]))
    return Target(
        name, _number(worst["rss_ratio"]), "<=", RSS_RATIO_GOAL, f"most: {worst['process']}"
    )


def _number(value: Cell) -> float:
    assert isinstance(value, int | float), value
    return float(value)


def in_use(page: str) -> dict[str, float]:
    """Series of the metrics page that should be 0 on an idle server, and are not."""
    names = tuple(name for name, metric in METRICS.items() if metric.is_use)
    lines = [line for line in page.splitlines() if line.startswith(names)]
    assert lines, "the metrics page has none of the gauges of use"
    return {series_key(s): s.value for s in series_of(lines) if s.name in names and s.value != 0}


def self_checks(page: str) -> dict[str, float]:
    """Model -> number of passed self-checks."""
    lines = [line for line in page.splitlines() if line.startswith(SELF_CHECKS)]
    return {series.labels["model"]: series.value for series in series_of(lines)}


def wait_rest(addresses: Addresses) -> dict[str, float]:
    """Poll for REST_S_MAX until nothing is in use; returns what still is."""
    give_up_s = time.monotonic() + REST_S_MAX
    while (used := in_use(fetch_page(addresses.metrics_url))) and time.monotonic() < give_up_s:
        time.sleep(0.5)
    return used


@dataclass(frozen=True, slots=True)
class UserLoad:
    """Locust's users of the default mix. `think_s`: their mean pause; None: Locust's default."""

    users: int
    seconds: float
    seed: int
    think_s: float | None = None


def run_locust(addresses: Addresses, load: UserLoad, log: Path) -> int:
    """Locust's exit status: 1 for failures; rejections and slow answers are not judged here."""
    think = [] if load.think_s is None else [f"--think-s={load.think_s:.3f}"]
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUST_FILE),
        "--headless",
        "--only-summary",
        f"--host={addresses.grpc}",
        f"--users={load.users}",
        f"--spawn-rate={load.users}",
        f"--run-time={load.seconds:.0f}s",
        f"--seed={load.seed}",
        *think,
        "--slo-ttft-p90=none",
        "--slo-tbt-p90=none",
        "--unloaded-requests=1",
    ]
    with log.open("wb") as output:
        return subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False
        ).returncode


def ended(page: str, outcome: str) -> float:
    """Requests with this outcome since the server started."""
    return counter_sum(page, "mooncake_requests_total", {"outcome": outcome}) or 0.0


def think_s_for(requests_per_s: float, users: int, answer_s: float) -> float:
    """The think time of users that together send `requests_per_s`, when an answer takes `answer_s`:
    each sends once per think time and answer (Little's law)."""
    return max(0.0, users / requests_per_s - answer_s)


def one_look(pid: int) -> Looks:
    watch = ProcessWatch(pid)
    watch.look()
    return watch.looks


@dataclass(slots=True)
class MixedEndings:
    """Counts by kind, and messages of the requests with an unexpected end."""

    ended: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MixedSender:
    client: TritonClient
    addresses: Addresses
    rng: random.Random
    vocabulary_tokens: int

    def request(self, number: int) -> GenerateRequest:
        """Half of the prompts share a beginning, so that prefixes are shared and fetched."""
        rng = self.rng
        stem = random.Random(rng.randrange(8))
        ids = [stem.randrange(16, self.vocabulary_tokens) for _ in range(rng.choice((0, 256)))]
        ids += [rng.randrange(16, self.vocabulary_tokens) for _ in range(rng.randint(1, 200))]
        output_tokens = rng.randint(1, 24)
        return GenerateRequest(
            request_id=f"mixed-{number}",
            input_ids=np.array(ids, np.int32),
            max_tokens=output_tokens,
            end_id=-1,
            stream=rng.random() < 0.8,
        )

    async def good(self, number: int) -> str:
        async for event in self.client.generate(self.request(number)):
            if event.finish_reason:
                return "good"
        return "unexpected: no finish reason"

    async def bad(self, number: int) -> str:
        wrong = self.rng.choice(WAYS_TO_BE_WRONG)
        try:
            async for _ in self.client.generate(replace(self.request(number), **wrong)):
                pass
        except Rejected:
            raise
        except ServerError as error:
            return "bad" if error.kind == "invalid_request" else f"unexpected: {wrong}: {error}"
        return f"unexpected: {wrong} was answered"

    async def left(self, number: int) -> str:
        """Leaves before the first token or after some."""
        request = replace(self.request(number), max_tokens=200, stream=True)
        patience_s = self.rng.random() * 0.3

        async def read() -> None:
            async for _ in self.client.generate(request):
                pass

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(), patience_s)
        return "left"

    async def good_http(self, number: int) -> str:
        body = self._body(self.request(number), is_stream=False)
        url = f"http://{self.addresses.http}/v2/models/conductor/generate"
        answer = await asyncio.to_thread(posted, url, body, False)
        is_fine = answer.ok or "rejected kind=" in answer.text
        return "good http" if is_fine else f"unexpected: {answer.text}"

    async def left_http(self, number: int) -> str:
        body = self._body(self.request(number), is_stream=True) | {"max_tokens": 200}
        events = self.rng.randint(1, 8)
        await asyncio.to_thread(self._leave_http, body, events)
        return "left http"

    def _leave_http(self, body: dict[str, object], events: int) -> None:
        url = f"http://{self.addresses.http}/v2/models/conductor/generate_stream"
        with posted(url, body, True) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number >= events:
                    return

    def _body(self, request: GenerateRequest, is_stream: bool) -> dict[str, object]:
        assert request.input_ids is not None
        return {
            "input_ids": request.input_ids.tolist(),
            "max_tokens": request.max_tokens,
            "end_id": -1,
            "stream": is_stream,
        }


def posted(url: str, body: dict[str, object], is_stream: bool) -> requests.Response:
    """POST without the proxies of the environment: the server runs on this machine."""
    with requests.Session() as session:
        session.trust_env = False
        return session.post(url, json=body, stream=is_stream, timeout=HTTP_S_MAX)


async def send_mixed(
    addresses: Addresses, count: int, seed: int, in_flight_max: int
) -> MixedEndings:
    """Send `count` requests; returns when the last has ended."""
    rng = random.Random(seed)
    mixed, slots = MixedEndings(), asyncio.Semaphore(in_flight_max)
    kinds = rng.choices(list(SHARES), list(SHARES.values()), k=count)
    async with TritonClient(addresses.grpc) as client:
        server = await describe_server(client, {})
        sender = MixedSender(client, addresses, rng, server.vocabulary_tokens)

        async def send(number: int, kind: str) -> None:
            async with slots:
                try:
                    ended = await getattr(sender, kind.replace(" ", "_"))(number)
                except Rejected:
                    ended = "rejected"
                except (ServerError, requests.RequestException) as error:
                    ended = f"unexpected: {kind}: {error}"
                mixed.ended[ended.partition(":")[0]] += 1
                if ended.startswith("unexpected"):
                    mixed.unexpected.append(ended)

        await asyncio.gather(*(send(number, kind) for number, kind in enumerate(kinds)))
    return mixed


def run_mixed(addresses: Addresses, count: int, seed: int, in_flight_max: int) -> MixedEndings:
    try:
        return asyncio.run(send_mixed(addresses, count, seed, in_flight_max))
    except ServerError as error:  # a ServerError cannot be pickled
        raise CannotMeasure(str(error)) from None


@dataclass(slots=True)
class LeakTest:
    """The phases on one running server; rows and targets collect."""

    addresses: Addresses
    pid: int
    seed: int
    rows: list[dict[str, Cell]]
    targets: list[Target]
    capacities_per_s: list[float] = field(default_factory=list)

    def pace(self, users: int, share: float) -> UserLoad:
        """The users that request this share of the capacity."""
        capacity_per_s = self.capacity(users)
        think_s = think_s_for(capacity_per_s * share, users, users / capacity_per_s)
        tried = UserLoad(users, PACE_S, self.seed, think_s)
        answer_s = users / self._answered_per_s("first pace", tried) - think_s
        return replace(tried, think_s=think_s_for(capacity_per_s * share, users, answer_s))

    def capacity(self, users: int) -> float:
        """Requests answered per second without think time."""
        rate = self._answered_per_s("capacity", UserLoad(users, PACE_S, self.seed, think_s=0.0))
        self.capacities_per_s.append(rate)
        return rate

    def _answered_per_s(self, phase: str, load: UserLoad) -> float:
        self.seed += 1
        answered, _ = self._send_users(phase, replace(load, seed=self.seed))
        rate = answered / load.seconds
        if not rate:
            raise CannotMeasure(f"no request was answered in the {load.seconds:.0f} s of {phase}")
        self.rows.append({"phase": phase, "think_s": load.think_s, "answered_per_s": rate})
        return rate

    def _send_users(self, phase: str, load: UserLoad) -> tuple[float, int]:
        """(requests answered, Locust's exit status)."""
        before = fetch_page(self.addresses.metrics_url)
        with tempfile.NamedTemporaryFile(prefix="mooncake-leaks-", suffix=".log") as file:
            log = Path(file.name)
            with console.status(f"{phase}: {load} (log: {log}) ..."):
                status = run_locust(self.addresses, load, log)
            console.print(log.read_text(encoding="utf-8", errors="replace")[-4_000:], markup=False)
        time.sleep(SETTLE_S)
        after = fetch_page(self.addresses.metrics_url)
        counts = {outcome: ended(after, outcome) - ended(before, outcome) for outcome in OUTCOMES}
        console.print(f"{phase}: { ({name: n for name, n in counts.items() if n}) }", markup=False)
        return counts["answered"], status

    def load(self, load: UserLoad) -> float:
        """Requests answered per second."""
        watch = ProcessWatch(self.pid)
        watch.start()
        started_s = time.perf_counter()
        answered, status = self._send_users("load", load)
        ended_s = time.perf_counter()
        watch.stop()
        # Locust's unloaded requests before and the last answers after the load are outside.
        begin_s = max(started_s, ended_s - load.seconds)
        windows = ComparedMinutes(
            (begin_s + WINDOW_S, begin_s + 2 * WINDOW_S), (ended_s - WINDOW_S, ended_s)
        )
        rows = load_rows(watch.looks, windows)
        self.rows += rows
        self.targets.append(rss_target(rows))
        self.targets += growth_targets("load", rows, *MINUTES)
        self.targets.append(Target("load_locust_exit_status", float(status), "<=", 0))
        self._rest("load", None)
        return answered / load.seconds

    def soak(self, users: int, seconds: float, share: float) -> None:
        """The load, with users that request this share of the capacity."""
        answered_per_s = self.load(replace(self.pace(users, share), seconds=seconds))
        self.capacity(users)
        found = answered_per_s / statistics.mean(self.capacities_per_s)
        why = f"{answered_per_s:.2f} requests/s"
        self.targets.append(Target("load_share_of_capacity", found, ">=", share * PACE_SLACK, why))

    def checks(self) -> None:
        """A failed check would have ended its process, which the other targets show."""
        passed = self_checks(fetch_page(self.addresses.metrics_url))
        fewest = min(passed, key=lambda model: passed[model], default=None)
        why = "no model shows any" if fewest is None else f"{fewest}, of {len(passed)} models"
        value = None if fewest is None else passed[fewest]
        self.targets.append(Target("self_checks_passed", value, ">=", 1, why))

    def warm_up(self, count: int) -> None:
        self._send("warm_up", count, 2 * IN_FLIGHT_MAX)
        self._rest("warm_up", None)

    def mixed(self, count: int) -> None:
        before = one_look(self.pid)
        self._send("mixed", count, IN_FLIGHT_MAX)
        self._rest("mixed", before)

    def _send(self, phase: str, count: int, in_flight_max: int) -> None:
        """Send in a process of its own: gRPC closes its last connections when that process ends."""
        self.seed += 1
        with (
            console.status(f"{phase}: {count} mixed requests ..."),
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        ):
            sent = process.submit(run_mixed, self.addresses, count, self.seed, in_flight_max)
            mixed = sent.result()
        console.print(f"{phase}: {dict(mixed.ended)}", markup=False)
        why = "; ".join(mixed.unexpected[:3])
        self.targets.append(Target(f"{phase}_unexpected", len(mixed.unexpected), "<=", 0, why))

    def _rest(self, phase: str, before: Looks | None) -> None:
        """At the end of a phase: nothing is in use, and no process has more than in `before`."""
        left = wait_rest(self.addresses)
        why = ", ".join(f"{name} {value:g}" for name, value in left.items())
        self.targets.append(Target(f"{phase}_left_in_use", len(left), "<=", 0, why))
        if before is not None:
            rows = rest_rows(phase, before, self._settled(before))
            self.rows += rows
            self.targets += growth_targets(phase, rows, *REST)

    def _settled(self, before: Looks) -> Looks:
        """Threads and connections end a moment after their request: look until none is too many."""
        give_up_s = time.monotonic() + REST_S_MAX
        while True:
            looks = one_look(self.pid)
            is_settled = all(
                target.is_met for target in growth_targets("", rest_rows("", before, looks), *REST)
            )
            if is_settled or time.monotonic() > give_up_s:
                return looks
            time.sleep(0.5)


def main(
    seconds: Annotated[
        float, typer.Option(min=180, help="Time of Locust; three minutes at least.")
    ] = (300.0),
    users: Annotated[int, typer.Option(min=1, help="Locust's users.")] = 20,
    mixed: Annotated[int, typer.Option(min=1, help="Mixed requests, before and after.")] = 1_000,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness; random by default.")] = (
        None
    ),
    capacity_share: Annotated[
        float | None,
        typer.Option(min=0.1, max=0.95, help="Users think so long that this share is asked for."),
    ] = None,
) -> None:
    """Look for what grows or stays behind; the last line is JSON."""
    seed = secrets.randbits(31) if seed is None else seed
    console.print(f"--seed {seed}")
    with (
        benchmark("leaks") as run,
        own_repository((), {"conductor": {"hot_keys_max": str(HOT_KEYS_MAX)}}) as repository,
        started(
            ["--self-check", "--store-bytes", STORE_BYTES, "--model-repository", str(repository)]
        ) as server,
    ):
        test = LeakTest(server.addresses, server.pid, seed, run.rows, run.targets)
        test.warm_up(mixed)
        if capacity_share is None:
            test.load(UserLoad(users, seconds, seed))
        else:
            test.soak(users, seconds, capacity_share)
        test.mixed(mixed)
        test.checks()


if __name__ == "__main__":
    typer.run(main)
