"""A block that every node of a fleet has: its answer is kept, and is never an old one."""

from __future__ import annotations

import random
from dataclasses import replace

from mooncake_store.directory.core.block_index import KEPT_FROM
from mooncake_store.directory.core.directory import Directory
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import SSD_SUFFIX
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, node_info, put

NODES = [f"s{number}" for number in range(KEPT_FROM + 5)]
HOT = chain(1, "hot")


def looked_up(directory: Directory, now_s: float) -> tuple[Copy, ...]:
    (copies,) = directory.lookup(HOT, "", 0.0, now_s, prefix_only=False)
    return copies


def test_the_answer_for_a_hot_block_follows_every_copy_that_comes_and_goes(seed: int) -> None:
    chance, directory = random.Random(seed), directory_with(*NODES)
    for node_id in NODES[:3]:  # an SSD beside some of them
        info = replace(
            node_info(node_id),
            node_id=node_id + SSD_SUFFIX,
            tier="ssd",
            segment_bytes=8 * BLOCK_BYTES,
        )
        directory.register_node(info, 0.0)
        directory.attach(info.node_id, "print", BLOCK_BYTES, 0.0)
    holders = [*NODES, *(node_id + SSD_SUFFIX for node_id in NODES[:3])]
    there: list[str] = []
    most = 0
    for step in range(300):
        now_s, node_id = float(step), chance.choice(holders)
        if node_id in there and chance.random() < 0.4:
            assert directory.remove(HOT, now_s, node_id) == [True]
            there.remove(node_id)
        elif node_id not in there:
            put(directory, HOT, node_id, owner=f"writer-{step}", now_s=now_s)
            there.append(node_id)
        dram = [each for each in there if not each.endswith(SSD_SUFFIX)]
        ssd = [each for each in there if each.endswith(SSD_SUFFIX)]
        for _ in range(2):  # made, then kept
            assert [copy.node_id for copy in looked_up(directory, now_s)] == dram + ssd
            directory.check()
        most = max(most, len(there))
    assert most > KEPT_FROM, "no answer was kept"


def test_a_copy_that_was_written_anew_is_not_answered_as_the_one_before() -> None:
    directory = directory_with(*NODES)
    for node_id in NODES:
        put(directory, HOT, node_id)
    before = looked_up(directory, 1.0)
    assert directory.drop_copy(HOT[0], "s4", before[4].generation, 1.0)
    put(directory, HOT, "s4", owner="again", now_s=1.0)
    after = looked_up(directory, 1.0)
    assert [copy.node_id for copy in after] == [*NODES[:4], *NODES[5:], "s4"]
    assert after[-1].generation > before[4].generation
    directory.check()
