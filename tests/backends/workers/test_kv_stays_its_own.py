"""Whatever fails, and however late the writer is: a committed block has the bytes of its key.

Random walks over a prefill and a decode worker whose threads are stepped by hand. --seed chooses
the first walk, MOONCAKE_WALKS how many there are.
"""

from __future__ import annotations

import os

import pytest

from tests.backends.stepped_site import CONTEXT_TOKENS, VOCABULARY, Site, answer_of

WALKS = int(os.environ.get("MOONCAKE_WALKS", "12"))
STEPS = 400


class Walk:
    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, is_layerwise: bool) -> None:
        self.site = site = Site(seed, monkeypatch, is_layerwise)
        self.rng = site.rng
        self.stems = [self._tokens(self.rng.randint(4, 20)) for _ in range(3)]
        site.store.fault_share = self.rng.choice((0.0, 0.01, 0.05))
        site.store.late_share = self.rng.choice((0.0, 0.05))
        site.store.lost_share = self.rng.choice((0.0, 0.05))
        site.damage_share = self.rng.choice((0.0, 0.1))
        for worker in site.workers:
            worker.driver.engine.fault_share = self.rng.choice((0.0, 0.05, 0.2))

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            for worker in self.site.workers:
                worker.check()
        self.site.settle()

    def step(self) -> None:
        site, rng = self.site, self.rng
        kind = rng.random()
        if kind < 0.12:
            stem = rng.choice(self.stems)
            prompt = stem[: rng.randint(1, len(stem))] + self._tokens(rng.randint(1, 16))
            tokens_max = rng.randint(1, CONTEXT_TOKENS - len(prompt))
            site.ask(prompt, tokens_max, priority=rng.choice((0, 0, 0, 1, 2)))
        elif kind < 0.15 and site.clients:
            client = rng.choice(site.clients[-6:])
            for worker in site.workers:
                worker.stop(client.request_id)
        elif kind < 0.2:
            site.store.evict()
        elif kind < 0.6:
            site.turn(rng.choice(site.workers))
        elif todo := site.things_to_do():
            rng.choice(todo)()


@pytest.mark.parametrize("is_layerwise", [False, True])
@pytest.mark.parametrize("number", range(WALKS))
def test_every_committed_block_has_the_bytes_of_its_key(
    number: int, is_layerwise: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = Walk(seed + number, monkeypatch, is_layerwise)
    walk.run(STEPS)
    assert walk.site.store.wrong == []
    assert walk.site.store.commits > 0
    for client in walk.site.clients:
        if client.error is None and client.answer:
            right = answer_of(client.prompt, client.sampling.max_tokens)
            assert client.answer == right[: len(client.answer)]
    walk.site.check_empty()
