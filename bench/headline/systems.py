"""The compared systems as commands: what each starts, with which threads and how much KV memory.

    vllm        (a)  `vllm serve`, one process, all threads, defaults
    vllm-tuned  (a2) the same with the best of MAX_BATCHED_TOKENS
    vllm-two    (b)  two `vllm serve`, half of the threads each, behind vLLM's router
    vllm-pd     (c)  a prefill and a decode `vllm serve` that hand KV over by NIXL, same router
    mooncake    (d)  `make serve`: two prefill workers and one decode worker
    mooncake-vllm (e) the same with vLLM as the engine: a prefill and a decode worker, half of the
                     threads each

Each has KV_BYTES of memory for KV in all. vLLM keeps one core free by default on CPUs. Here every
system uses all cores, and so does the client. vLLM runs with Intel's OpenMP, which its log advises.
Compiled code of vLLM stays in `state`. Ours divides its memory: half for the storage nodes, one for
each prefill worker, half for the workers' own pages.

Pure except `mooncake_repository`. Not here: starting and stopping (servers.py).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.shipped import shipped_repository
from conductor.config import AUTO
from loadtest.harness.server import PROJECT, set_parameters

KV_BYTES = 2 * 2**30
MAX_BATCHED_TOKENS = (256, 512, 2048)
ROUTER_POLICIES = ("cache_aware", "power_of_two", "round_robin")
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {  # of plan_of, chosen by a short search
    "vllm-tuned": {str(tokens): {"batched_tokens": tokens} for tokens in MAX_BATCHED_TOKENS},
    "vllm-two": {policy: {"policy": policy} for policy in ROUTER_POLICIES},
}
SYSTEMS = {
    "a": "vllm", "a2": "vllm-tuned", "b": "vllm-two", "c": "vllm-pd", "d": "mooncake",
    "e": "mooncake-vllm",
}  # fmt: skip
OURS: Mapping[str, Sequence[str]] = {  # system -> the roles of its workers
    "mooncake": ("prefill", "prefill", "decode"),
    "mooncake-vllm": ("prefill", "decode"),
}
# NIXL's default of four threads polls on the worker's own cores: with one core, a forward pass did
# not end within a minute.
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0},
}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """One process group; ready when `ready_url` answers 200. "": before what starts later."""

    name: str
    words: tuple[str, ...]
    ready_url: str
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SystemPlan:
    """Commands of one stage start together; a later stage starts when the earlier one is ready."""

    stages: tuple[tuple[ServerCommand, ...], ...]
    base_url: str  # the client's


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of this machine that the commands need."""

    checkpoint: Path
    vllm_bin: Path
    router_bin: Path | None  # None: not installed
    cores: tuple[int, ...]
    state: Path  # folder for compiled code and the server's state, kept between rounds

    def halves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cores of two processes; one core is shared when there is no other."""
        middle = max(1, len(self.cores) // 2)
        return self.cores[:middle], self.cores[middle:] or self.cores[:middle]


def plan_of(
    system: str,
    machine: Machine,
    ports: Sequence[int],
    batched_tokens: int | None = None,
    policy: str = ROUTER_POLICIES[0],
) -> SystemPlan:
    """`ports`: at least six free ones. `batched_tokens`: of vllm-tuned; `policy`: of the router."""
    if system in ("vllm", "vllm-tuned"):
        extra = () if batched_tokens is None else ("--max-num-batched-tokens", str(batched_tokens))
        one = vllm(machine, system, ports[0], machine.cores, KV_BYTES, extra)
        return SystemPlan(((one,),), url(ports[0]))
    if system == "vllm-two":
        workers = tuple(
            vllm(machine, f"vllm-{number}", ports[number], cores, KV_BYTES // 2)
            for number, cores in enumerate(machine.halves())
        )
        words = ["--worker-urls", url(ports[0]), url(ports[1]), "--policy", policy]
        return SystemPlan((workers, (router(machine, ports, words),)), url(ports[2]))
    if system == "vllm-pd":
        transfer = ("--kv-transfer-config", json.dumps(NIXL))
        workers = tuple(
            vllm(
                machine, role, ports[number], cores, KV_BYTES // 2, transfer,
                {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[4 + number])},
            )
            for number, (role, cores) in enumerate(
                zip(("vllm-prefill", "vllm-decode"), machine.halves(), strict=True)
            )
        )  # fmt: skip
        words = ["--vllm-pd-disaggregation", "--prefill", url(ports[0]), "--decode", url(ports[1])]
        words += ["--kv-connector", "nixl", "--policy", "round_robin"]
        return SystemPlan((workers, (router(machine, ports, words),)), url(ports[2]))
    assert system in OURS, f"no system {system!r}; use one of {', '.join(SYSTEMS.values())}"
    return SystemPlan(((mooncake(machine, ports, system),),), url(ports[0]))


def vllm(
    machine: Machine,
    name: str,
    port: int,
    cores: Sequence[int],
    kv_bytes: int,
    extra: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> ServerCommand:
    words = [str(machine.vllm_bin / "vllm"), "serve", str(machine.checkpoint)]
    # Ours serves a checkpoint under the name of its folder.
    words += ["--served-model-name", machine.checkpoint.name]
    words += ["--host", "127.0.0.1", "--port", str(port), *extra]
    return ServerCommand(
        name,
        tuple(words),
        f"{url(port)}/health",
        {
            "VLLM_CPU_KVCACHE_SPACE": f"{kv_bytes / 2**30:g}",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CACHE_ROOT": str(machine.state / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # vLLM's log recommends it: its threads then spin for less time between two layers.
            "LD_PRELOAD": str(machine.vllm_bin.parent / "lib" / "libiomp5.so"),
            **(variables or {}),
        },
    )


def router(machine: Machine, ports: Sequence[int], words: Sequence[str]) -> ServerCommand:
    assert machine.router_bin is not None, "the router is installed before it is used"
    command = [str(machine.router_bin / "vllm-router"), *words, "--host", "127.0.0.1"]
    command += ["--port", str(ports[2]), "--prometheus-port", str(ports[3])]
    command += ["--worker-startup-check-interval", "1", "--disable-retries"]
    return ServerCommand("vllm-router", tuple(command), f"{url(ports[2])}/health")


def mooncake(machine: Machine, ports: Sequence[int], system: str) -> ServerCommand:
    workers = OURS[system]
    words = [sys.executable, "-m", "backends.cli", "serve", "--checkpoint", str(machine.checkpoint)]
    words += ["--dtype", "bfloat16", "--openai-port", str(ports[0])]
    words += ["--http-port", str(ports[1]), "--grpc-port", str(ports[2])]
    words += ["--metrics-port", str(ports[3])]
    words += ["--model-repository", str(repository_of(machine, system))]
    words += ["--state-dir", str(machine.state / system)]
    words += ["--prefill", str(workers.count("prefill")), "--decode", str(workers.count("decode"))]
    nodes = [f"s{number}" for number in range(workers.count("prefill"))]
    words += ["--nodes", ",".join(nodes), "--store-bytes", str(KV_BYTES // 2 // len(nodes))]
    return ServerCommand(system, tuple(words), f"{url(ports[0])}/ready", {"PYTHONUNBUFFERED": "1"})


def repository_of(machine: Machine, system: str) -> Path:
    return machine.state / f"{system}-repository"


def mooncake_repository(
    machine: Machine, system: str, limits: str = AUTO, prefill_threads: int = 1
) -> None:
    """Copy the shipped model repository; only the workers' engine, threads and memory for KV
    differ, and the service levels if `limits` is TTFT,TBT in seconds. Raises ValueError for other
    limits."""
    folder = repository_of(machine, system)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(shipped_repository(), folder)
    roles = OURS[system]
    workers = [f"{role}_{roles[:i].count(role)}" for i, role in enumerate(roles)]
    if limits != AUTO:
        ttft_s, tbt_s = map(float, limits.split(","))
        set_parameters(folder, "conductor", {"ttft_slo_s": ttft_s, "tbt_slo_s": tbt_s})
    for worker in workers:
        set_parameters(folder, worker, {"kv_bytes": KV_BYTES // 2 // len(workers)})
        if prefill_threads != 1 and worker.startswith("prefill"):
            set_parameters(folder, worker, {"threads": prefill_threads})
        if system == "mooncake-vllm":
            python = machine.vllm_bin / "python"
            set_parameters(folder, worker, {"engine": "vllm", "engine_python": str(python)})


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


SERVER_FOLDER = PROJECT  # `python -m backends.cli` finds its package there
