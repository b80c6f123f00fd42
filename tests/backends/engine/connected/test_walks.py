"""Random walks: requests of all lengths come, hit, are cancelled and end, in every mode.

What the fake model makes of a page is a pure function of the prompt, so everything can be checked:
each answer against the model alone, each block that is put into the store against what was put
under its key before. A page that was read too early, too late or from the wrong place shows: what
lies in slots of the storage node, whose incarnations come and go, is filled anew the moment that
its lease ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from mooncake_store.block_keys import block_keys, chain_seed
from tests.backends.engine.connected.connected import Connected, Make, expected
from tests.backends.engine.connected.listening import WAIT_S

B = 16
STEPS = 600


@dataclass
class Going:
    name: str
    prompt: list[int]
    tokens_max: int
    salt: str
    request: Any
    pages: list[int] = field(default_factory=list)
    put_blocks: int = 0
    in_slots: frozenset[int] = frozenset()  # blocks


class Walk:
    def __init__(self, engines: list[Connected], chance: random.Random) -> None:
        self.engines, self.chance = engines, chance
        self.store: dict[bytes, bytes] = {}
        self.going: list[list[Going]] = [[] for _ in engines]
        self.history: list[tuple[list[int], str]] = []  # prompts and answers, to go on from
        self.number = self.hits = self.answers = self.cancelled = self.read_in_place = 0
        self.saved_in_place = 0
        for engine in engines:
            engine.start_node()

    def step(self) -> None:
        which = self.chance.randrange(len(self.engines))
        engine, going = self.engines[which], self.going[which]
        choice = self.chance.random()
        if choice < 0.3 and len(going) < 6:
            self.arrive(engine, going)
        elif choice < 0.31:
            engine.start_node(slots=self.chance.choice([1, 3, 20]))
        elif choice < 0.36 and going:
            engine.executor.abort(self.chance.choice(going).request)
        elif engine.executor.has_work:
            engine.shake(self.chance)
            engine.executor.step()
        for each in list(going):
            is_loaded = ("loaded", each.name) in engine.heard.all
            if each.in_slots and is_loaded and self.chance.random() < 0.5:
                engine.end_leases(each.name)
            self.put(engine, each)
            if each.request.finish_reason:
                going.remove(each)
                self.leave(engine, each)

    def prompt(self) -> tuple[list[int], str]:
        if self.history and self.chance.random() < 0.7:
            known, salt = self.chance.choice(self.history[-20:])
            kept = known[: self.chance.randrange(len(known) // 2, len(known) + 1)]
            salt = salt if self.chance.random() < 0.9 else ""
        else:
            kept, salt = [], self.chance.choice(["", "a"])
        more = self.chance.choice([0, 1, 3, B, 25, 40])
        fresh = [self.chance.randrange(2048) for _ in range(max(more, 1 - len(kept)))]
        return (kept + fresh)[:90], salt

    def arrive(self, engine: Connected, going: list[Going]) -> None:
        prompt, salt = self.prompt()
        tokens_max = self.chance.choice([1, 1, 2, 9, 20])
        self.number += 1
        name = str(self.number)
        pages: list[int] = []
        wanted = -(-(len(prompt) + tokens_max) // B)
        if self.chance.random() < 0.85 and wanted <= len(engine.free_pages):
            loaded = 0
            for key in block_keys(prompt, B, chain_seed("print", cache_salt=salt)):
                if key not in self.store:
                    break
                loaded += B
            self.hits += loaded > 0
            pages = engine.stage(
                name, prompt, self.store, loaded, tokens_max, salt, self.chance.random() < 0.7
            )
        in_slots = frozenset(engine.in_slots(name))
        self.read_in_place += len(in_slots)
        request = engine.submit(self.number, prompt, tokens_max, salt=salt or None)
        going.append(Going(name, prompt, tokens_max, salt, request, pages, in_slots=in_slots))

    def put(self, engine: Connected, each: Going) -> None:
        """Blocks that are in the pool by now, as a worker puts them, also of a cancelled one."""
        saved = [what[2] for what in engine.heard.all if what[:2] == ("saved", each.name)]
        blocks = max(saved, default=0) // B
        known = each.request.tokens[: blocks * B]
        keys = block_keys(known, B, chain_seed("print", cache_salt=each.salt))
        for block in range(each.put_blocks, len(keys)):
            if block in each.in_slots:
                continue  # it is in the store
            there = engine.block(each.name, each.pages, block)
            if there is None:
                continue
            found = there.tobytes()
            self.saved_in_place += block in engine.filling.get(each.name, ())
            assert self.store.setdefault(keys[block], found) == found, (each.name, block)
        each.put_blocks = max(each.put_blocks, len(keys))

    def leave(self, engine: Connected, each: Going) -> None:
        output = engine.output(each.request)
        wanted = expected(engine, each.prompt, each.tokens_max)
        if each.request.finish_reason == "cancelled":
            self.cancelled += 1
            assert output == wanted[: len(output)]
        else:
            self.answers += 1
            assert output == wanted, each.name
            self.history.append((each.prompt + output, each.salt))
        if each.pages:
            engine.host.unstage(each.name, WAIT_S).result(WAIT_S)
            self.put(engine, each)  # what came out last
            engine.unstage(each.name, each.pages)

    def finish(self) -> None:
        for engine, going in zip(self.engines, self.going, strict=True):
            engine.executor.run_until_idle()
            for each in going:
                self.leave(engine, each)
            assert engine.all_free
            for copies in engine.copies:
                assert copies is not None and not copies._is_broken
            scheduler = engine.scheduler
            scheduler.check()
            assert not scheduler._table.entries and not scheduler._table.taken


@pytest.mark.slow
@pytest.mark.parametrize("is_overlapping", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_nothing_wrong_is_ever_computed_or_kept(
    make: Make, tp_size: int, is_overlapping: bool, seed: int
) -> None:
    chance = random.Random(seed)
    engines = [
        make(
            tensor_parallel_size=tp_size,
            disable_overlap_scheduler=not is_overlapping,
            enable_chunked_prefill=True,
            max_num_tokens=chance.choice([16, 40, 8192]),
            max_batch_size=chance.choice([2, 6]),
            pool_pages=30,
            aside_bytes_min=chance.choice([0, 1, 4096]),
            cache={
                "max_tokens": 200,
                "enable_block_reuse": chance.random() < 0.7,
                "enable_partial_reuse": chance.random() < 0.3,
            },
        )
        for _ in range(2)
    ]
    for engine in engines:
        engine.executor.aborts_are_told = chance.random() < 0.5
    walk = Walk(engines, chance)
    for _ in range(STEPS):
        walk.step()
    walk.finish()
    assert walk.answers and walk.hits, (walk.answers, walk.hits, walk.cancelled)
    assert walk.read_in_place and walk.saved_in_place
