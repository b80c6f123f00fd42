"""Which card is near which memory, told from recorded /sys trees; odd trees are told, never fatal.

Each tree is parsed as recorded, and read from a folder that was made after it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_store.transports import host_topology, nixl_agent
from mooncake_store.transports.host_topology import read_tree
from mooncake_store.transports.paths.topology import (
    LINK,
    Closeness,
    Topology,
    closeness,
    expand,
    parse,
)

DATA = Path(__file__).resolve().parents[2] / "data"
TREES = ("8-gpu-server", "one-nic-vm", "small-vm", "broken")


def recorded(name: str) -> dict[str, str]:
    tree: dict[str, str] = json.loads((DATA / f"sys-{name}.json").read_text())
    return tree


def build(tree: dict[str, str], root: Path) -> None:
    """A folder that says what the tree says, with real links."""
    for path, text in tree.items():
        if text.startswith(LINK):
            target = root / text.removeprefix(LINK)
            target.mkdir(parents=True, exist_ok=True)
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(os.path.relpath(target, (root / path).parent))
    for path, text in tree.items():
        if not text.startswith(LINK):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n")


@pytest.mark.parametrize("name", TREES)
def test_a_folder_reads_as_the_tree_it_was_made_from(name: str, tmp_path: Path) -> None:
    tree = recorded(name)
    build(tree, tmp_path)
    found = read_tree(str(tmp_path))
    skipped = {path for path in tree if path.startswith("bus/pci") and path not in found}
    assert found == {path: text for path, text in tree.items() if path not in skipped}
    assert parse(found) == parse(tree)


def test_each_gpu_of_a_server_prefers_the_card_at_its_own_switch() -> None:
    server = parse(recorded("8-gpu-server"))
    assert server.problems == ()
    near = {gpu.address[5:7]: server.near_gpu(gpu) for gpu in server.gpus}
    assert near == {
        "1b": ("mlx5_0",),
        "43": ("mlx5_3",),
        "52": ("mlx5_4",),
        "61": ("mlx5_5",),
        "9d": ("mlx5_6",),
        "c3": ("mlx5_9",),
        "d1": ("mlx5_10",),
        "df": ("mlx5_11",),
    }


def test_memory_of_a_socket_prefers_the_cards_of_that_socket_and_never_one_that_is_down() -> None:
    server = parse(recorded("8-gpu-server"))
    assert [len(node.cpus) for node in server.numa_nodes] == [112, 112]
    assert server.numa_nodes[0].memory_bytes == 1056270128 * 1024
    zero = ("mlx5_0", "mlx5_1", "mlx5_3", "mlx5_4", "mlx5_5")
    one = ("mlx5_6", "mlx5_7", "mlx5_9", "mlx5_10", "mlx5_11")
    assert server.near_numa(0) == zero
    assert server.near_numa(1) == one
    assert [nic.name for nic in server.nics if not nic.is_up] == ["mlx5_2", "mlx5_8"]
    assert {nic.bits_per_s for nic in server.nics if nic.has_rdma} == {400 * 10**9}


def test_closeness_is_what_two_devices_share() -> None:
    server = parse(recorded("8-gpu-server"))
    nics = {nic.name: nic for nic in server.nics}
    gpu = server.gpus[0]
    assert closeness(nics["mlx5_0"], gpu) is Closeness.SWITCH
    assert closeness(nics["mlx5_3"], gpu) is Closeness.NUMA
    assert closeness(nics["mlx5_11"], gpu) is Closeness.NOTHING
    vm = parse(recorded("one-nic-vm"))
    assert closeness(vm.nics[0], vm.gpus[0]) is Closeness.BRIDGE


def test_a_management_chip_is_no_gpu_and_a_bridge_no_card() -> None:
    server = parse(recorded("8-gpu-server"))
    assert len(server.gpus) == 8 and {gpu.vendor for gpu in server.gpus} == {"0x10de"}
    assert "0000:03:00.0" in str(recorded("8-gpu-server"))  # the chip is in the tree
    assert {nic.name for nic in server.nics} & {"lo", "docker0"} == set()


@pytest.mark.parametrize(
    ("name", "cpus", "devices"),
    [
        ("8-gpu-server", [3, 4], "mlx5_0:1,mlx5_1:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,eno3"),
        ("8-gpu-server", [200], "mlx5_6:1,mlx5_7:1,mlx5_9:1,mlx5_10:1,mlx5_11:1,eno3"),
        ("one-nic-vm", [0], "mlx5_0:1,ens5"),
        ("small-vm", [0, 1], ""),
        ("broken", [8], "mlx4_0:1,eth0,eth1"),
    ],
)
def test_ucx_is_told_the_ports_near_this_process(name: str, cpus: list[int], devices: str) -> None:
    assert parse(recorded(name)).ucx_net_devices(cpus) == devices


def test_a_process_on_both_sockets_may_use_every_port() -> None:
    devices = parse(recorded("8-gpu-server")).ucx_net_devices(range(224))
    assert devices.count("mlx5_") == 10 and "mlx5_2:" not in devices


def test_a_host_with_one_numa_node_needs_nobody_to_say_so() -> None:
    vm = parse(recorded("one-nic-vm"))
    assert vm.problems == ()
    assert [nic.numa_node for nic in vm.nics] == [gpu.numa_node for gpu in vm.gpus] == [0]
    assert vm.near_numa(0) == vm.near_gpu(vm.gpus[0]) == ("mlx5_0",)


def test_what_is_odd_is_listed_and_the_rest_is_used() -> None:
    broken = parse(recorded("broken"))
    said = "\n".join(broken.problems)
    for what in (
        "node0/cpulist: invalid literal",
        "node0/meminfo: no MemTotal",
        "rate: no rate in Gb/sec",
        "mlx4_0: its position on the PCI bus is unknown",
        "eth0/device/numa_node: the NUMA node of the device is unknown",
        "eth1/speed: 'fast' is no number",
        "eth1/device/numa_node: missing",
        "'one' is no number",
    ):
        assert what in said, said
    assert broken.near_numa(0) == ("mlx4_0",)  # near nothing is still a card
    assert broken.nics[0].rdma_ports == (1,)
    assert parse({}).problems == ("devices/system/node/: no NUMA node is listed",)


def test_no_damage_to_a_tree_makes_it_fail(seed: int) -> None:
    chance = random.Random(seed)
    for name in TREES:
        whole = recorded(name)
        for _ in range(60):
            tree = {path: text for path, text in whole.items() if chance.random() < 0.9}
            for path in chance.sample(sorted(tree), 5):
                tree[path] = chance.choice(
                    ["", "-1", "x", "-> /", "-> devices/pci0000:00", "9" * 30]
                )
            found = parse(tree)
            json.dumps(found.as_dict())
            found.ucx_net_devices(range(8))
            assert isinstance(found, Topology)


def test_cpu_lists_expand() -> None:
    assert expand("0-2,8,10-11") == (0, 1, 2, 8, 10, 11)
    assert expand("") == ()


def test_this_host_is_read_and_shown() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mooncake_store.transports.host_topology"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, read_here = json.loads(ran.stdout), json.loads(host_topology.topology_json())
    if Path("/sys/devices/system/node").exists():
        assert sum(node["cpus"] for node in said["numa"]) >= len(os.sched_getaffinity(0))
    for node in (*said["numa"], *read_here["numa"]):
        assert node.pop("memory_bytes") > 0  # a virtual machine's may change from one to the other
    assert read_here == said


def test_nixl_gets_the_devices_of_the_topology_unless_somebody_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_topology, "host_topology", lambda: parse(recorded("one-nic-vm")))
    for name in ("UCX_MODULES", "UCX_NET_DEVICES", "UCX_LOG_FILE"):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(nixl_agent, "has_rdma", lambda: True)
    nixl_agent.prepare_environment()
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1,ens5" and "UCX_MODULES" not in os.environ
    monkeypatch.setenv("UCX_NET_DEVICES", "mine")
    nixl_agent.prepare_environment()
    assert os.environ["UCX_NET_DEVICES"] == "mine"


def test_a_name_with_a_superscript_digit_is_sorted_as_text() -> None:
    tree = {f"class/net/eth{end}/operstate": "up" for end in ("10", "2", "\u00b2")}
    assert parse(tree).nics == (), "no card has a place on the bus"
