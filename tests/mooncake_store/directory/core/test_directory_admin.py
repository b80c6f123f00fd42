"""Questions and orders about blocks: exist, remove; and which policy of eviction is used."""

from __future__ import annotations

import pytest

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.eviction import POLICIES
from mooncake_store.errors import RequestInvalid
from mooncake_store.records.events import BlockRemoved
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, node_info, put


def test_exist_answers_each_key_and_changes_nothing() -> None:
    directory = directory_with("s0", slots=4)
    keys = chain(4)
    put(directory, keys[:2], now_s=0.0)
    put(directory, keys[3:], now_s=1.0)
    before = directory.stats(2.0)
    assert directory.exist(b"".join(keys), 2.0) == bytes([1, 1, 0, 1])
    assert directory.exist(b"", 2.0) == b""
    assert directory.stats(2.0) == before, "neither a lease nor a lookup"
    put(directory, chain(2, "b"), now_s=3.0)
    assert directory.exist(b"".join(keys[:1]), 3.0) == b"\x01"
    assert directory.exist(keys[1], 3.0) == b"\x00", "a question is no use"


def test_a_block_that_is_being_written_does_not_exist_yet() -> None:
    directory = directory_with("s0")
    directory.allocate("s0", chain(1), "w", 5.0, False, 0.0)
    assert directory.exist(chain(1)[0], 0.0) == b"\x00"


def test_a_key_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="17 bytes are no whole number of keys"):
        directory_with("s0").exist(b"x" * 17, 0.0)


def test_removing_gives_up_every_copy_and_says_so() -> None:
    directory = directory_with("s0", "s1")
    keys = chain(2)
    put(directory, keys, "s0")
    put(directory, keys, "s1")
    before = directory.sequence
    assert directory.remove(keys[:1], 1.0) == [True]
    directory.check()
    assert directory.events_since(before) == [
        BlockRemoved(keys[0], "s0"),
        BlockRemoved(keys[0], "s1"),
    ]
    assert directory.exist(b"".join(keys), 1.0) == bytes([0, 1])
    assert directory.stats(1.0).nodes[0].free_units == 7, "free at once: nobody was in it"


def test_removing_on_one_node_leaves_the_others() -> None:
    directory = directory_with("s0", "s1")
    put(directory, chain(1), "s0")
    put(directory, chain(1), "s1")
    assert directory.remove(chain(1), 1.0, node_id="s0") == [True]
    assert directory.lookup(chain(1), "r", 0.0, 1.0)[0][0].node_id == "s1"
    assert directory.remove(chain(1), 1.0, node_id="s0") == [True], "it is not there: as wished"


def test_what_is_leased_is_not_removed_until_its_users_are_done() -> None:
    directory = directory_with("s0", "s1")
    put(directory, chain(1), "s0")
    directory.lookup(chain(1), "reader", 5.0, 0.0)
    put(directory, chain(1), "s1")
    assert directory.remove(chain(1), 1.0) == [False]
    directory.check()
    assert [copy.node_id for copy in directory.lookup(chain(1), "r", 0.0, 1.0)[0]] == ["s0"]
    directory.release("reader", 2.0)
    assert directory.remove(chain(1), 2.0) == [True]
    assert directory.exist(chain(1)[0], 2.0) == b"\x00"


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_policy_is_chosen_by_name_and_told_what_became_of_a_block(eviction: str) -> None:
    directory = Directory(1, DirectoryConfig(eviction=eviction))
    directory.register_node(node_info(slots=4), 0.0)
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    for round_number in range(40):
        now_s = float(round_number)
        directory.node_report("s0", "n1", now_s)
        put(directory, chain(3, f"n{round_number % 5}"), now_s=now_s)
        directory.lookup(chain(1, f"n{round_number % 5}"), "r", 3.0, now_s)
        directory.pin(chain(1, "n1"), ["soft", "hard", "none"][round_number % 3], 2.0, now_s)
        directory.release("r", now_s)
        directory.remove(chain(1, "n2"), now_s)
        directory.check()
    assert directory.stats(40.0).evictions > 20


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    (problem,) = DirectoryConfig(eviction="random").problems()
    assert problem == "eviction is 'random'; use lru or density"
