"""Workers on vLLM while bytes rot, and processes die or stand still: nothing wrong, hung or lost.

MOONCAKE_DAMAGE_SEED sets what is hit, MOONCAKE_DAMAGE_S for how many seconds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.backends.engine.reference import Reference
from tests.e2e.damage import Asked, BitFlips, Clients, all_serve, frozen
from tests.e2e.server import Server, wait_until
from tests.e2e.server_processes import process_of, stub_of
from tests.vllm.engine_processes import alive, engine_core, engine_processes
from tests.vllm.serving import plain_tokens, prompts_of, random_checkpoint, serving

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800)]

CLIENTS, OUTPUT_TOKENS = 2, 40
THINK_S = 0.5  # after each answer, so that engines that start find a core
PROMPT_TOKENS = (40, 64, 65, 130, 200, 257, 320, 333, 400, 450, 513, 600)
ANSWERS_BETWEEN, FLIPS_PER_ANSWER = 10, 12
FROZEN_S = 8.0  # longer than the directory waits for a report
RESTART_S_MAX = 240.0  # four engines may start at once on two cores
WORKERS = ("prefill_0", "prefill_1", "decode_0", "decode_1")


def victims(server: Server) -> dict[str, Callable[[], psutil.Process]]:
    """What may be hit: name -> how to find it."""
    found: dict[str, Callable[[], psutil.Process]] = {
        "the storage node": lambda: process_of(server, "--node-id s0"),
        "the directory": lambda: process_of(server, "mooncake_store.directory"),
    }
    for worker in WORKERS:
        first = lambda worker=worker: engine_processes(server, worker)[0]  # noqa: E731
        found[f"the worker {worker}"] = lambda worker=worker: stub_of(server, worker)
        found[f"vLLM's process of {worker}"] = first
        found[f"the EngineCore of {worker}"] = lambda first=first: engine_core(first())
    return found


def hit(server: Server, name: str, is_kill: bool) -> None:
    victim = victims(server)[name]()
    print(f"{time.strftime('%X')} {'kill' if is_kill else 'freeze'} {name}", flush=True)
    if is_kill:
        victim.kill()
        return
    thaws_at_s = time.monotonic() + FROZEN_S
    with frozen(victim):
        wait_until(lambda: time.monotonic() > thaws_at_s, "the freeze to be over")


def test_damage_changes_no_answer_and_hangs_none(tmp_path: Path) -> None:
    seed = int(os.environ.get("MOONCAKE_DAMAGE_SEED", "20"))
    until_s = float(os.environ.get("MOONCAKE_DAMAGE_S", "300"))
    print(f"MOONCAKE_DAMAGE_SEED={seed}")
    checkpoint = random_checkpoint("llama", tmp_path / "checkpoint")
    prompts = prompts_of(PROMPT_TOKENS, seed)
    answers = plain_tokens(checkpoint, prompts, OUTPUT_TOKENS)
    asked = [
        Asked(prompt, Reference(answer, OUTPUT_TOKENS))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for server in serving(tmp_path, tmp_path / "state", checkpoint, workers=2):
        _damage(server, asked, seed, time.monotonic() + until_s)


def _damage(server: Server, asked: list[Asked], seed: int, until_s: float) -> None:
    flips, chance = BitFlips(server, seed), random.Random(seed)
    everybody = [p for worker in WORKERS for p in engine_processes(server, worker)]
    names = list(victims(server))
    pause = threading.Event()  # never set

    def on_answer() -> None:
        flips.flip(FLIPS_PER_ANSWER)
        pause.wait(THINK_S)

    with Clients(server, asked, CLIENTS, seed, on_answer) as clients:
        while time.monotonic() < until_s:
            clients.wait_for_more(ANSWERS_BETWEEN)
            hit(server, chance.choice(names), chance.random() < 0.6)
            wait_until(lambda: all_serve(server), "all workers to serve", RESTART_S_MAX)
    print(f"{clients.answered} answers, {flips.flipped} bits flipped, {clients.errors}")
    assert clients.answered
    assert not clients.wrong
    assert not clients.hung
    assert all(" kind=" in f" {error}" for error in clients.errors), clients.errors
    wait_until(server.is_idle, "pages, slots and leases to be free", 60.0)
    now = {p.pid for worker in WORKERS for p in engine_processes(server, worker)}
    gone = [process for process in everybody if process.pid not in now]
    wait_until(lambda: not alive(gone), f"the end of {alive(gone)}")
