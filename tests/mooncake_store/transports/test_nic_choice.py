"""Which cards of a host move KV, and which pairs of cards two hosts use."""

from __future__ import annotations

import random

import pytest

from mooncake_store.records.membership import NicAgent
from mooncake_store.transports.paths.nic_choice import (
    PAIRS_MAX,
    DataNetwork,
    Interface,
    data_network,
    nic_pairs,
)


def card(name: str, network: str = "10.0.0", **more: object) -> Interface:
    values: dict[str, object] = {
        "addresses": (f"{network}.1",),
        "networks": (f"{network}.0/24",),
        **more,
    }
    return Interface(name=name, **values)  # type: ignore[arg-type]


def there(name: str, *networks: str) -> NicAgent:
    nets = tuple(f"{network}.0/24" for network in networks)
    return NicAgent(nic=name, agent_name=name, agent_metadata=b"", networks=nets)


E0, E1 = card("e0", "10.78.0"), card("e1", "10.79.0")
DOCKER = [
    card("docker0", "172.17.0", is_physical=False, is_bridge=True),
    card("veth1", is_physical=False, is_part=True),
]


def names(found: DataNetwork) -> list[str]:
    return [nic.name for nic in found.nics]


@pytest.mark.parametrize(
    ("interfaces", "expected"),
    [
        ([], []),
        ([E0], []),  # one card: one agent, as UCX makes it
        ([E0, E1], ["e0", "e1"]),
        ([E0, *DOCKER], []),
        ([E0, E1, *DOCKER], ["e0", "e1"]),
        ([E0, card("e1", is_up=False)], []),
        ([E0, card("e1", addresses=(), networks=())], []),
        ([E0, card("ib0", rdma_devices=("mlx5_0:1",))], []),  # UCX chooses among its own
        ([card("v0", is_physical=False), card("v1", is_physical=False)], ["v0", "v1"]),
        ([E0, card("v0", is_physical=False)], []),  # a VPN beside the card
    ],
)
def test_several_cards_get_agents_of_their_own(
    interfaces: list[Interface], expected: list[str]
) -> None:
    found = data_network(interfaces, trusted=None, ucx_net_devices="")
    assert (names(found), found.is_closed, found.shared_devices) == (expected, False, "")


def test_the_operator_names_the_cards_and_no_other_is_used() -> None:
    found = data_network([E0, E1, card("e2")], trusted=" e1, e9,e1 ", ucx_net_devices="e0,e2")
    assert names(found) == ["e1"] and found.missing == ("e9",)
    assert found.is_closed and found.shared_devices == "lo,e1"


def test_no_trusted_card_means_no_nixl_to_other_hosts() -> None:
    found = data_network([E0, E1], trusted="", ucx_net_devices="")
    assert found == DataNetwork(shared_devices="lo", is_closed=True)


def test_a_trusted_card_with_rdma_is_used_by_its_rdma_devices() -> None:
    ib = card("ib0", rdma_devices=("mlx5_0:1", "mlx5_0:2"))
    found = data_network([E0, ib], trusted="ib0", ucx_net_devices="")
    assert [nic.ucx_devices for nic in found.nics] == ["mlx5_0:1,mlx5_0:2,ib0"]
    assert found.shared_devices == "lo,mlx5_0:1,mlx5_0:2,ib0"


@pytest.mark.parametrize(
    ("devices", "expected"),
    [("e0", []), ("e0,e1", ["e0", "e1"]), ("lo,e0", []), ("mlx5_0:1,e0", []), ("e1,e0,lo", None)],
)
def test_what_ucx_net_devices_names_is_kept_to(devices: str, expected: list[str] | None) -> None:
    found = data_network([E0, E1, card("e2")], trusted=None, ucx_net_devices=devices)
    assert names(found) == (["e1", "e0"] if expected is None else expected)
    assert not found.is_closed


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        ([E0, E1], [there("x", "10.78.0"), there("y", "10.79.0")], [(0, 0), (1, 1)]),
        ([E0, E1], [there("y", "10.79.0"), there("x", "10.78.0")], [(0, 1), (1, 0)]),
        ([E0, E1], [there("x", "10.1.0"), there("y", "10.2.0")], [(0, 0), (1, 1)]),  # routed
        ([E0], [there("x", "10.1.0"), there("y", "10.2.0")], [(0, 0), (0, 1)]),
        ([E0, E1], [there("x", "10.78.0")], [(0, 0)]),  # e1 is of another network
        ([E0, E1], [], []),
        ([], [there("x", "10.78.0")], []),
    ],
)
def test_cards_of_one_network_are_a_pair(
    own: list[Interface], theirs: list[NicAgent], expected: list[tuple[int, int]]
) -> None:
    assert nic_pairs(own, theirs) == expected


def test_pairs_of_any_two_hosts_are_possible_ones(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        networks = [f"10.{n}.0" for n in range(chance.randint(1, 5))]
        own = [card(f"o{i}", chance.choice(networks)) for i in range(chance.randint(0, 6))]
        theirs = [
            there(f"t{i}", *chance.sample(networks, chance.randint(0, len(networks))))
            for i in range(chance.randint(0, 6))
        ]
        pairs = nic_pairs(own, theirs)
        assert len(pairs) == len(set(pairs)) <= PAIRS_MAX
        assert bool(pairs) == bool(own and theirs) or not any(
            set(a.networks) & set(b.networks) for a in own for b in theirs
        )
        sharing = {
            (i, j)
            for i, a in enumerate(own)
            for j, b in enumerate(theirs)
            if set(a.networks) & set(b.networks)
        }
        if len(pairs) < PAIRS_MAX:
            assert {i for i, _ in sharing} <= {i for i, _ in pairs}
            assert {j for _, j in sharing} <= {j for _, j in pairs}
        for i, j in set(pairs) - sharing:  # routed: neither has a better one
            assert not any(a == i or b == j for a, b in sharing)
