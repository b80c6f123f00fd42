"""What an earlier directory granted is refused by its epoch, by whichever verb it comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import EpochPassed, StoreUnavailable
from mooncake_store.layout import STATE_WRITING
from mooncake_store.records.blocks import Slot
from tests.mooncake_store.makers import BLOCK_BYTES, chain, node_info

EPOCH = 7
KEY = chain(1)[0]
Ask = Callable[[Directory, int], object]
VERBS: dict[str, Ask] = {
    "commit": lambda directory, epoch: directory.commit(
        "s0", [(KEY, 0, 1, 1)], "w", 5.0, 0.0, epoch=epoch
    ),
    "renew": lambda directory, epoch: directory.renew("w", 5.0, 0.0, epoch=epoch),
    "node_report": lambda directory, epoch: directory.node_report("s0", "n1", 0.0, epoch=epoch),
    "adopt": lambda directory, epoch: directory.adopt("s0", "n1", [], True, 0.0, epoch=epoch),
    "take_spills": lambda directory, epoch: directory.take_spills(
        "s0", "spill", 1, 5.0, 0.0, epoch=epoch
    ),
}


def directory_with_writer() -> tuple[Directory, Slot]:
    directory = Directory(EPOCH, begin_s=0.6)
    assert directory.register_node(node_info("s0"), 0.0) == EPOCH
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    (slot,) = directory.allocate("s0", [KEY], "w", 5.0, False, 0.0).slots
    assert slot is not None
    return directory, slot


@pytest.mark.parametrize("verb", VERBS)
def test_an_older_epoch_is_refused_and_changes_nothing(verb: str) -> None:
    directory, slot = directory_with_writer()
    before = directory.stats(0.0)
    with pytest.raises(EpochPassed, match=f"epoch {EPOCH - 1} granted this; {EPOCH} leads"):
        VERBS[verb](directory, EPOCH - 1)
    directory.check()
    assert directory.stats(0.0) == before
    row = (KEY, slot.slot, slot.generation, 9)
    assert directory.commit("s0", [row], "w", 5.0, 0.0, epoch=slot.epoch) == [True]


@pytest.mark.parametrize("verb", VERBS)
def test_a_later_epoch_shows_a_directory_that_it_cannot_lead(verb: str) -> None:
    directory, _ = directory_with_writer()
    with pytest.raises(StoreUnavailable, match="cannot lead any more"):
        VERBS[verb](directory, EPOCH + 1)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_without_an_election_any_other_epoch_is_over(verb: str, epoch: int) -> None:
    directory = Directory(EPOCH)
    with pytest.raises(EpochPassed, match=f"epoch {epoch} granted this; {EPOCH} leads by now"):
        VERBS[verb](directory, epoch)


def test_slots_say_who_granted_them_and_by_when_they_must_be_begun() -> None:
    directory, slot = directory_with_writer()
    assert slot.epoch == EPOCH
    assert directory.allocate("s0", chain(2)[1:], "w", 5.0, False, 0.0).begin_s == 0.6
    assert directory.abandon([slot], "w", 0.0) == 1


def test_a_begun_slot_rests_for_its_lease_but_not_longer_than_leases_last() -> None:
    info = replace(node_info("s0", slots=4), has_inventory=True)
    for lease_ms, rests_s in ((20_000, 20.0), (2**63, 3_600.0), (0, 0.0)):
        directory = Directory(EPOCH)
        directory.register_node(info, 0.0)
        directory.attach("s0", "print", BLOCK_BYTES, 0.0)
        begun = (KEY, 0, 5, lease_ms, BLOCK_BYTES, STATE_WRITING)
        assert directory.adopt("s0", "n1", [begun], True, 0.0) == 0
        until_s = rests_s + directory.config.quarantine_s
        for now_s, units in ((until_s - 0.1, 1), (until_s, 0)):
            directory.node_report("s0", "n1", now_s)
            directory.tick(now_s)
            (node,) = directory.stats(now_s).nodes
            assert node.quarantined_units == units, (lease_ms, now_s)
        directory.check()
