"""What one host runs follows from the deployment."""

from __future__ import annotations

import pytest

from backends.cluster.cluster_file import parse
from backends.cluster.host_plan import gpus_of, host_plan, pool_host_plan
from tests.backends.cluster.fleet_text import ONE_HOST, THREE_HOSTS

ELECTION = "etcd://10.77.0.1:2379,10.77.0.2:2379,10.77.0.3:2379/mooncake/demo/directory"


def test_a_host_of_a_fleet_runs_its_part() -> None:
    deployment = parse(THREE_HOSTS, "/fleet/cluster.yaml")
    b, c = host_plan(deployment, "b"), host_plan(deployment, "c")
    assert b.etcd is not None and b.etcd.listen_peer_url == "https://10.77.0.2:2380"
    assert b.etcd.initial_cluster == (
        "a=https://10.77.0.1:2380,b=https://10.77.0.2:2380,c=https://10.77.0.3:2380"
    )
    assert b.directory is not None
    assert (b.directory.listen, b.directory.listen_events, b.directory.etcd) == (
        "tcp://10.77.0.2:7001",
        "tcp://10.77.0.2:7002",
        ELECTION,
    )
    (node,) = b.storage_nodes
    assert (node.control, node.data) == ("tcp://10.77.0.2:7010", "10.77.0.2:7011")
    assert b.frontend is not None and b.frontend.grpc == "0.0.0.0:8001"
    assert [(w.model, w.grpc) for w in b.workers] == [
        ("prefill_b_0", "10.77.0.2:7100"),
        ("decode_b_0", "10.77.0.2:7200"),
    ]
    assert c.directory is None and c.frontend is None and c.etcd is not None
    assert [w.parameters["threads"] for w in c.workers] == ["1", "3"]
    assert (c.folder, c.model_repository) == ("/fleet", "rendered/c/model_repository")


def test_the_nodes_of_a_host_differ_in_their_ports() -> None:
    plan = host_plan(parse(THREE_HOSTS), "a")
    assert [node.control for node in plan.storage_nodes] == [
        "tcp://10.77.0.1:7010",
        "tcp://10.77.0.1:7012",
    ]
    assert [node.data for node in plan.storage_nodes] == ["10.77.0.1:7011", "10.77.0.1:7013"]


def test_the_environment_says_where_everything_is() -> None:
    deployment = parse(THREE_HOSTS, "/fleet/cluster.yaml")
    assert host_plan(deployment, "b").environment == {
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "e0",
        "MOONCAKE_DIRECTORY": ELECTION,
        "MOONCAKE_EVENTS": "",
        "MOONCAKE_ADDRESS": "10.77.0.2",
        "MOONCAKE_PEERS": "10.77.0.1,10.77.0.2,10.77.0.3",
        "MOONCAKE_KEYS": "/fleet/keys",
        "MOONCAKE_TRUSTED_NICS": "e0",
    }
    assert host_plan(deployment, "c").environment["MOONCAKE_HOST_IDENTITY"] == "c"


def test_with_keys_and_no_trusted_network_no_interface_is_trusted() -> None:
    text = THREE_HOSTS.replace("trusted_data_network: [e0]\n", "")
    environment = host_plan(parse(text), "a").environment
    assert environment["MOONCAKE_TRUSTED_NICS"] == ""
    plain = host_plan(parse(text.replace("{folder: keys}", "{insecure: true}")), "a")
    environment = plain.environment
    assert "MOONCAKE_TRUSTED_NICS" not in environment and "MOONCAKE_KEYS" not in environment
    assert plain.etcd is not None and plain.etcd.advertised_client_url == "http://10.77.0.1:2379"
    assert environment["MOONCAKE_INSECURE"] == "1"


def test_one_host_without_etcd_has_one_directory_that_all_know() -> None:
    plan = host_plan(parse(ONE_HOST), "here")
    assert plan.etcd is None and plan.directory is not None and plan.directory.etcd == ""
    assert plan.directory_address == "tcp://127.0.0.1:7001"
    assert plan.events_address == "tcp://127.0.0.1:7002"


def test_a_host_with_a_dns_name_listens_on_every_address() -> None:
    text = THREE_HOSTS.replace("address: 10.77.0.1", "address: a.fleet.svc")
    plan = host_plan(parse(text), "a")
    assert plan.directory is not None
    assert plan.directory.listen == "tcp://0.0.0.0:7001"
    assert plan.directory.advertised == "tcp://a.fleet.svc:7001"
    assert plan.environment["MOONCAKE_LISTEN"] == "0.0.0.0"


def test_a_host_that_is_not_in_the_file_may_serve_a_pool() -> None:
    deployment = parse(THREE_HOSTS.replace("slots: 16", "slots: 16, elastic: {most: 4, dram: 2G}"))
    plan = pool_host_plan(deployment, "decode", "decode-7f9c-x2x", "10.77.3.9")
    (worker,) = plan.workers
    assert (worker.model, worker.grpc) == ("decode_decode-7f9c-x2x_0", "10.77.3.9:7200")
    (node,) = plan.storage_nodes
    assert worker.store_node == node.name == "decode-7f9c-x2x"
    assert (node.control, node.dram_bytes) == ("tcp://10.77.3.9:7010", 2 << 30)
    assert worker.parameters["slots"] == "16"
    assert plan.directory_address == ELECTION and plan.etcd is None
    with pytest.raises(KeyError):
        pool_host_plan(deployment, "encode", "x", "10.77.3.9")
    with pytest.raises(KeyError):  # not elastic
        pool_host_plan(deployment, "prefill", "x", "10.77.3.9")


def test_segments_in_huge_pages_or_elsewhere_take_nothing_of_shared_memory() -> None:
    text = THREE_HOSTS.replace("dram: 1G,", "dram: 1G, segment_path: /dev/hugepages/a1,")
    assert host_plan(parse(THREE_HOSTS), "a").shm_bytes == (256 << 20) + (1 << 30)
    assert host_plan(parse(text), "a").shm_bytes == 256 << 20
    text = text.replace("/dev/hugepages/a1", "/dev/shm/a1")
    assert host_plan(parse(text), "a").shm_bytes == (256 << 20) + (1 << 30)


def test_workers_of_a_host_get_gpus_in_turns_besides_those_that_are_named() -> None:
    four = {
        "p0": {"engine": "tensorrt_llm", "tp_size": "2"},
        "p1": {"engine": "tensorrt_llm", "gpus": "0,3", "tp_size": "2"},
        "cpu": {"threads": "4"},
        "d0": {"engine": "tensorrt_llm"},
    }
    assert gpus_of(four) == {"p0": "1,2", "p1": "0,3", "d0": "4"}


def test_workers_on_vllm_get_gpus_only_if_their_device_is_no_cpu() -> None:
    workers = {
        "p0": {"engine": "vllm", "tp_size": "2"},
        "p1": {"engine": "vllm", "device": "cpu"},
        "d0": {"engine": "vllm", "device": "cuda", "tp_size": "2"},
        "d1": {"engine": "torch", "device": "cuda"},
    }
    assert gpus_of(workers) == {"d0": "0,1"}


def test_hosts_of_one_address_have_ports_of_their_own_for_clients_and_metrics() -> None:
    text = THREE_HOSTS.replace("  b: {", "  a2: {address: 10.77.0.1}\n  b: {", 1).replace(
        "frontends: {hosts: [a, b]", "frontends: {hosts: [a, a2, b]"
    )
    deployment = parse(text)
    plans = {name: host_plan(deployment, name) for name in ("a", "a2", "b")}
    found = {
        name: (
            plan.frontend and plan.frontend.http,
            plan.frontend and plan.frontend.grpc,
            plan.metrics,
        )
        for name, plan in plans.items()
    }
    assert found == {
        "a": ("0.0.0.0:8000", "0.0.0.0:8001", "127.0.0.1:8002"),
        "a2": ("0.0.0.0:8010", "0.0.0.0:8011", "127.0.0.1:8012"),
        "b": ("0.0.0.0:8000", "0.0.0.0:8001", "127.0.0.1:8002"),
    }
