"""Serving while bytes rot, processes die and one stands still: nothing wrong, hung or lost.

A random small Qwen3 model, so that every wrong bit of KV is another token; four clients, greedy,
each answer compared with transformers. MOONCAKE_DAMAGE_SEED sets what is hit.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.engine.checkpoints import load_reference, make_checkpoint
from tests.backends.engine.reference import greedy
from tests.backends.small_tokenizers import EOS, byte_level, write_checkpoint
from tests.e2e.damage import Asked, BitFlips, Clients, all_serve, frozen
from tests.e2e.server import Server, running, wait_until
from tests.e2e.server_processes import process_of

CLIENTS, OUTPUT_TOKENS, VOCABULARY = 4, 40, 352
PROMPT_TOKENS = (40, 64, 65, 130, 200, 257, 320, 333, 400, 450, 513, 600)
ANSWERS_BETWEEN = 20  # two events
FLIPS_PER_ANSWER = 12
FROZEN_S = 8.0  # longer than the directory waits for a report

KILLED = {
    "decode worker": "/decode_0/1/model.py",
    "prefill worker": "/prefill_1/1/model.py",
    "storage node": "--node-id s0",
    "directory": "mooncake_store.directory",
}


@pytest.fixture(scope="module")
def seed() -> int:
    chosen = int(os.environ.get("MOONCAKE_DAMAGE_SEED", "20"))
    print(f"MOONCAKE_DAMAGE_SEED={chosen}")
    return chosen


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, seed: int) -> list[Asked]:
    model = load_reference(checkpoint_in(tmp_path_factory.getbasetemp()))
    chance, found = random.Random(seed), []
    while len(found) < len(PROMPT_TOKENS):
        length = PROMPT_TOKENS[len(found)]
        prompt = [chance.randrange(10, 320) for _ in range(length)]
        reference = greedy(model, prompt, OUTPUT_TOKENS)
        if reference.compared_tokens == OUTPUT_TOKENS:  # no tie that may go either way
            found.append(Asked(prompt, reference))
    return found


def checkpoint_in(folder: Path) -> Path:
    path = folder / "qwen3"
    if not path.exists():
        make_checkpoint("qwen3", path, vocab_size=VOCABULARY)
        write_checkpoint(path, byte_level(), {"eos_token": EOS})
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    checkpoint = checkpoint_in(tmp_path_factory.getbasetemp())
    yield from running(
        tmp_path_factory.mktemp("damage"),
        state_dir,
        {"checkpoint": str(checkpoint)},
        ["--store-bytes", "16M"],
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_damage_costs_no_answer_and_changes_none(
    server: Server, asked: list[Asked], seed: int
) -> None:
    flips = BitFlips(server, seed)
    with Clients(server, asked, CLIENTS, seed, lambda: flips.flip(FLIPS_PER_ANSWER)) as clients:
        clients.wait_for_more(ANSWERS_BETWEEN)
        for words in KILLED.values():
            process_of(server, words).kill()
            clients.wait_for_more(ANSWERS_BETWEEN)
            wait_until(lambda: all_serve(server), f"all to serve after {words} died", 90.0)
            clients.wait_for_more(ANSWERS_BETWEEN)
        victim, thaws_at_s = process_of(server, "/decode_1/1/model.py"), time.monotonic() + FROZEN_S
        with frozen(victim):
            wait_until(lambda: time.monotonic() > thaws_at_s, "the freeze to be over")
        wait_until(lambda: all_serve(server), "the frozen worker to serve", 90.0)
        clients.wait_for_more(ANSWERS_BETWEEN)
    print(f"{clients.answered} answers, {flips.flipped} bits flipped, {clients.errors}")
    assert flips.flipped > 0.9 * FLIPS_PER_ANSWER * clients.ended
    assert server.metric("mooncake_store_bad_copies_total") > 0
    assert not clients.wrong
    assert not clients.hung
    # While the directory starts again nobody reports: who comes just then may hear of it.
    assert all(" kind=no_" in f" {error}" for error in clients.errors), clients.errors
    wait_until(server.is_idle, "pages, slots and leases to be free", 60.0)
