"""The cost of the gateway: time to first token, throughput, CPU, memory.

    python -m bench.gateway                  the last line is JSON
    python -m bench.gateway --soak-s 0       without the five minutes of users that leave

With the real server and API keys, in turns: pairs of the same request over Triton's gRPC and over
the gateway, and many streams at once over either. The CPU time of the gateway's process is compared
with that of this process while it only reads the direct streams. Prompts are fresh tokens, so the
second of a pair finds nothing cached. Then users send requests for minutes, a tenth of them leaves
early, and the memory of the gateway's process is sampled. With a frontend that replays: messages
per second through one gateway process.

Not here: sending (loads.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer

from backends.tenants import tenants_file
from backends.tenants.api_keys import make_key, sha256_of
from backends.tenants.tenants_file import KeyEntry, TenantEntry, TenantsFile
from bench.gateway import loads
from bench.gateway.loads import DirectWay, GatewayWay, Ways
from bench.harness.processes import ModuleProcess, cpu_s
from loadtest.harness.benchmark import BenchmarkRun, benchmark, console
from loadtest.harness.result import Target
from loadtest.harness.server import CannotMeasure, OwnServer, own_ports, started, wait_for_gateway

ROUNDS, WARM_ROUNDS = 5, 1
STREAMS, STREAM_TOKENS = 16, 400
BURST_STREAMS, BURST_TOKENS = 16, 4000
PROMPT_TOKENS = 64
WINDOW_S = 60.0  # of the soak: its second minute is compared with its last


@dataclass(frozen=True, slots=True)
class Keyed:
    """A file of API keys, and a key in it."""

    path: Path
    key: str


@contextlib.contextmanager
def keyed() -> Iterator[Keyed]:
    key = make_key()
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        path = Path(folder) / "tenants.json"
        keys = [KeyEntry(sha256_of(key), "bench")]
        tenants_file.write(path, TenantsFile({"bench": TenantEntry()}, keys))
        yield Keyed(path, key)


def gateway_process(launcher: int) -> psutil.Process:
    for child in psutil.Process(launcher).children():
        if "backends.gateway" in child.cmdline():
            return child
    raise CannotMeasure("the server runs no gateway")


def with_the_server(run: BenchmarkRun, pairs: int, soak_s: float, users: int, seed: int) -> None:
    [port] = own_ports(1)
    with keyed() as keys:
        arguments = ["--openai-port", str(port), "--api-keys", str(keys.path)]
        with console.status("waiting for the server ..."), started(arguments) as server:
            gateway = GatewayWay(f"127.0.0.1:{port}", keys.key)
            ways: Ways = {"direct": DirectWay(server.addresses.grpc), "gateway": gateway}
            measure_pairs(run, ways, pairs, seed)
            measure_streams(run, ways, server, seed)
            measure_soak(run, gateway, gateway_process(server.pid), soak_s, users, seed)


def measure_pairs(run: BenchmarkRun, ways: Ways, pairs: int, seed: int) -> None:
    found = asyncio.run(loads.pairs(ways, pairs, PROMPT_TOKENS, random.Random(seed)))
    added_ms = [(through_s - direct_s) * 1e3 for direct_s, through_s in found]
    direct_ms = statistics.median(direct_s for direct_s, _ in found) * 1e3
    run.rows.append({"pairs": len(found), "direct_ttft_ms": round(direct_ms, 2)})
    why = f"median of {len(found)} pairs, {direct_ms:.1f} ms direct"
    run.targets.append(Target("ttft_added_ms", statistics.median(added_ms), "<=", 5, why))


def measure_streams(run: BenchmarkRun, ways: Ways, server: OwnServer, seed: int) -> None:
    processes = {"direct": psutil.Process(), "gateway": gateway_process(server.pid)}
    rng = random.Random(seed)
    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    spent_s, messages = {"direct": 0.0, "gateway": 0.0}, {"direct": 0, "gateway": 0}
    for turn in range(WARM_ROUNDS + ROUNDS):
        for name, way in ways.items():
            before_s = cpu_s(processes[name])
            load = asyncio.run(loads.streams(way, STREAMS, PROMPT_TOKENS, STREAM_TOKENS, rng))
            if turn < WARM_ROUNDS:
                continue
            rates[name].append(load.tokens / load.seconds)
            spent_s[name] += cpu_s(processes[name]) - before_s
            messages[name] += load.messages
    direct, through = (statistics.median(rates[name]) for name in ("direct", "gateway"))
    reader_us, gateway_us = (spent_s[name] / messages[name] * 1e6 for name in ("direct", "gateway"))
    run.rows.append(
        {
            "streams": STREAMS,
            "direct_tokens_per_s": round(direct, 1),
            "gateway_tokens_per_s": round(through, 1),
            "messages": messages["gateway"],
            "bare_reader_cpu_us_per_message": round(reader_us, 1),
        }
    )
    why = f"{gateway_us / reader_us:.2f} of a client that reads over gRPC and does no more"
    run.targets += [
        Target("stream_throughput_over_direct", through / direct, ">=", 0.95),
        Target("gateway_cpu_us_per_message", gateway_us, "<=", 250, why),
    ]


@contextlib.contextmanager
def before_a_replay(interval_s: float) -> Iterator[tuple[GatewayWay, psutil.Process]]:
    """A gateway, its process, and a frontend that replays with such pauses between tokens."""
    frontend, port = own_ports(2)
    with contextlib.ExitStack() as stack:
        ModuleProcess(
            stack,
            "bench.harness.replayed_frontend",
            f"--address=127.0.0.1:{frontend}",
            f"--interval-s={interval_s}",
        )
        gateway = ModuleProcess(
            stack, "backends.gateway", "--frontend", f"127.0.0.1:{frontend}", "--port", str(port)
        )
        route = GatewayWay(f"127.0.0.1:{port}", "")
        wait_for_gateway(route.address)
        yield route, psutil.Process(gateway.pid)


def measure_burst(run: BenchmarkRun, seed: int) -> None:
    rng, rates = random.Random(seed), []
    with before_a_replay(0.0) as (route, _):
        for _ in range(WARM_ROUNDS + 3):
            load = asyncio.run(loads.streams(route, BURST_STREAMS, 4, BURST_TOKENS, rng))
            rates.append(load.messages / load.seconds)
    rate = statistics.median(rates[WARM_ROUNDS:])
    run.targets.append(Target("messages_per_s", rate, ">=", 2500, "one process, a replayed stream"))


def measure_soak(
    run: BenchmarkRun,
    route: GatewayWay,
    process: psutil.Process,
    seconds: float,
    users: int,
    seed: int,
) -> None:
    if seconds < 3 * WINDOW_S:
        why = f"not measured: {seconds:.0f} s are less than {3 * WINDOW_S:.0f} s"
        run.targets.append(Target("rss_growth_share", None, "<=", 0.03, why))
        return
    with console.status("users come and go ..."):
        soak = asyncio.run(
            loads.soak(
                route, users, seconds, lambda: process.memory_info().rss, random.Random(seed)
            )
        )
    first, last = soak.between(WINDOW_S, 2 * WINDOW_S), soak.between(seconds - WINDOW_S, seconds)
    run.rows.append(
        {
            "users": users,
            "answered": soak.answered,
            "left": soak.left,
            "refused": soak.refused,
            "first_mb": round(first / 1e6, 2),
            "last_mb": round(last / 1e6, 2),
        }
    )
    why = f"{users} users, {soak.left} of {soak.answered + soak.left} left early"
    run.targets.append(Target("rss_growth_share", last / first - 1, "<=", 0.03, why))


def main(
    pairs: Annotated[int, typer.Option(min=5, help="Pairs of requests for the added time.")] = 200,
    soak_s: Annotated[float, typer.Option(help="Seconds of users that leave; 0: none.")] = 300.0,
    users: Annotated[int, typer.Option(min=1, help="Users in the soak.")] = 50,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness.")] = None,
) -> None:
    """Measure the gateway; the last line is JSON."""
    seed = secrets.randbits(31) if seed is None else seed
    console.print(f"--seed {seed}")
    with benchmark("gateway") as run:
        with_the_server(run, pairs, soak_s, users, seed)
        measure_burst(run, seed)


if __name__ == "__main__":
    typer.run(main)
