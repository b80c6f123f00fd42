"""The control sockets of nodes that restart: one for each node, whatever came before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from mooncake_store.client.restorer import Restorer, _grouped
from mooncake_store.records.membership import NodeInfo
from mooncake_store.wire.node_protocol import BLOCKS_MAX, NodeClient, Restore
from tests.mooncake_store.makers import node_info


@pytest.fixture
def restorer() -> Iterator[Restorer]:
    made = Restorer(None, None)  # type: ignore[arg-type]  # neither is asked
    yield made
    made.close()


def at(port: int, node_id: str = "s0") -> NodeInfo:
    return replace(node_info(node_id), control=f"tcp://127.0.0.1:{port}")


def is_closed(client: NodeClient) -> bool:
    return client._requester._context.closed


def test_a_restart_closes_the_socket_to_the_incarnation_before(restorer: Restorer) -> None:
    seen = []
    for port in range(20_000, 20_050):
        with restorer.client(at(port)) as client, restorer.client(at(port)) as same:
            assert same is client
        seen.append(client)
    with restorer.client(at(1, "other")) as other:
        pass
    assert all(map(is_closed, seen[:-1]))
    assert not is_closed(seen[-1]) and not is_closed(other)
    assert len(restorer._clients) == 2 and not +restorer._users
    restorer.close()
    assert is_closed(seen[-1]) and is_closed(other)


def test_a_socket_in_use_is_closed_by_its_last_user(restorer: Restorer) -> None:
    with restorer.client(at(20_000)) as older:
        with restorer.client(at(20_000)), restorer.client(at(20_001)) as newer:
            assert not is_closed(older)
        assert not is_closed(older), "one uses it still"
    assert is_closed(older) and not is_closed(newer)


def test_who_knows_an_older_address_leaves_nothing_open(restorer: Restorer) -> None:
    """It goes to and fro between two who know the node differently for a moment."""
    seen = set()
    for turn in range(20):
        with restorer.client(at(20_000 + turn % 2)) as client:
            seen.add(client)
    assert sum(not is_closed(each) for each in seen) == 1


def test_a_group_of_small_blocks_fits_one_request() -> None:
    todo = [(index, Restore(bytes(16), index, 1, index, 2, 3, 64)) for index in range(10_000)]
    groups = _grouped(todo)
    assert [each for group in groups for each in group] == todo
    assert max(map(len, groups)) == BLOCKS_MAX
