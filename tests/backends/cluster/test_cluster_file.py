"""A cluster file becomes a deployment, or every mistake of it is named at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cluster.cluster_file import load, parse
from backends.cluster.deployment import ClusterFileInvalid
from backends.cluster.host_plan import host_plan
from backends.cluster.model_rendering import templates_in
from backends.cluster.section import CHARACTERS_MAX
from tests.backends.cluster.fleet_text import ONE_HOST, THREE_HOSTS


def problems(text: str) -> list[str]:
    with pytest.raises(ClusterFileInvalid) as caught:
        parse(text)
    return list(caught.value.problems)


def test_every_section_is_read() -> None:
    found = parse(THREE_HOSTS, "fleet/cluster.yaml")
    assert (found.name, found.folder, list(found.hosts)) == ("demo", "fleet", ["a", "b", "c"])
    assert found.hosts["b"].environment == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "e0"}
    assert (found.hosts["c"].identity, found.hosts["c"].state_dir) == ("c", ".mooncake-c")
    assert found.hosts["a"].state_dir == ".mooncake/a"
    assert found.etcd is not None and found.etcd.hosts == ("a", "b", "c")
    assert found.directories.hosts == ("a", "b") and found.directories.ttl_s == 3
    assert [(n.name, n.host, n.dram_bytes, n.ssd_bytes) for n in found.storage_nodes] == [
        ("a0", "a", 256 << 20, 0),
        ("a1", "a", 1 << 30, 2 << 30),
        ("b0", "b", 256 << 20, 0),
        ("c0", "c", 256 << 20, 0),
    ]
    assert found.conductor == {
        "admission": "reserved",
        "ttft_slo_s": "20",
        "tbt_slo_s": "0.1",
        "checkpoint": "demo",
    }
    assert found.keys_folder == "keys" and found.trusted_data_network == ("e0",)


def test_workers_are_named_after_pool_host_and_number_and_get_a_port_each() -> None:
    found = parse(THREE_HOSTS)
    assert [(w.model, w.grpc_port, w.store_node) for w in found.workers] == [
        ("prefill_a_0", 7100, "a0"),
        ("prefill_a_1", 7101, "a1"),
        ("prefill_a_2", 7102, "a0"),
        ("prefill_b_0", 7100, "b0"),
        ("decode_b_0", 7200, "b0"),
        ("decode_c_0", 7200, "c0"),
        ("decode_c_1", 7201, "c0"),
    ]
    prefill, decode = found.pools
    assert prefill.parameters == {"checkpoint": "demo", "dtype": "float32", "threads": "2"}
    assert decode.workers[2].parameters == {"threads": "3"}, "a list gives each worker its own"


def test_a_worker_needs_a_storage_node_on_its_own_host() -> None:
    found = problems(THREE_HOSTS.replace("c0: {host: c,", "c0: {host: b,"))
    assert len(found) == 1, "said once, not for each worker"
    assert "line 8: storage_nodes: host c has workers, but no storage node" in found[0]
    assert "add one, c0: {host: c, dram: 4G}" in found[0]
    found = problems(THREE_HOSTS.replace("{threads: 3}", "{threads: 3, store_node: b0}"))
    assert "decode_c_1: host c has no storage node 'b0'" in found[0]


def test_one_host_on_loopback_needs_neither_keys_nor_etcd() -> None:
    found = parse(ONE_HOST)
    assert found.etcd is None and not found.keys_folder and not found.is_insecure
    assert found.directories.hosts == ("here",) and found.frontends.hosts == ("here",)
    assert found.trusted_data_network is None


def test_one_line_changes_the_checkpoint_of_all_workers_and_tokenizers() -> None:
    found = parse(THREE_HOSTS.replace("checkpoint: demo", "checkpoint: models/qwen"))
    assert {pool.parameters["checkpoint"] for pool in found.pools} == {"models/qwen"}
    assert found.conductor["checkpoint"] == found.checkpoint == "models/qwen"


def test_every_mistake_is_named_at_once_with_line_path_and_remedy() -> None:
    text = THREE_HOSTS
    for right, wrong in {
        "a: {address: 10.77.0.1}": "a: {adress: 10.77.0.1}",
        "hosts: [a, b], port": "hosts: [a, bb], port",
        "b0: {host: b, dram: 256M}": "b0: {host: b, dram: lots}",
        "threads: 2": "threads: zero, thread: 2",
        "slots: 16": "slots: 0",
        "grpc_port: 7100": "grpc_port: 70000",
        "admission: reserved": "admision: reserved",
        "ttft_s: 20": "ttft_s: -1",
        "dtype: float32": "dtype: float12",
    }.items():
        assert right in text
        text = text.replace(right, wrong)
    found = "\n".join(problems(text + "name: again\nstorage: {}\n"))
    for line in (
        "line 3: hosts.a: has no address for other hosts: add one (address: IP)",
        "line 3: hosts.a.adress: unknown key; did you mean address?",
        "line 7: directories.hosts: there is no host 'bb'; did you mean b?",
        "line 11: storage_nodes.b0.dram: is 'lots', which is no size; use a size like 512M or 4G",
        "line 15: pools.prefill.thread: unknown parameter; did you mean threads?",
        "line 15: pools.prefill.threads: is 'zero'; expected int",
        "line 15: pools.prefill.grpc_port: is 70000; use 1 to 65535",
        "line 16: pools.decode.slots: is 0; use 1 to 4096",
        "line 17: defaults.dtype: is 'float12'; use float32 or bfloat16",
        "line 18: conductor.admision: unknown parameter; did you mean admission?",
        "line 19: slo.ttft_s: is -1.0; set a positive, finite number",
        "line 22: name is defined twice (first in line 1): remove one",
        "line 23: storage: unknown key; did you mean storage_nodes?",
    ):
        assert line in found.splitlines(), f"{line}\n--- not in\n{found}"
    assert len(found.splitlines()) == 13, found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("keys: {folder: keys}\n", ""), "ports are open to other machines"),
        (("{folder: keys}", "{folder: keys, insecure: true}"), "either folder: NAME or insecure"),
        (("address: 10.77.0.1", "address: 127.0.0.1"), "which the other hosts cannot reach"),
        (("address: 10.77.0.1", "address: 0.0.0.0"), "an IPv4 address or a DNS name"),
        (("address: 10.77.0.1", "address: 10.77.0.300"), "an IPv4 address or a DNS name"),
        (("address: 10.77.0.1", "address: 'a b'"), "an IPv4 address or a DNS name"),
        (
            ("address: 10.77.0.1", "address: 'fd00::1'"),
            "line 3: hosts.a.address: is 'fd00::1'; use an IPv4 address or a DNS name that has one "
            "(IPv6 is not supported)",
        ),
        (("10.77.0.1}", "10.77.0.1, listen: '::'}"), "an IPv4 address of the host"),
        (("address: 0.0.0.0", "address: '::'"), "frontends.address: is '::'; use an IPv4 address"),
        (("address: 0.0.0.0", "metrics_address: '::1'"), "use an IPv4 address, or 0.0.0.0"),
        (("hosts: [a, b, c], client", "endpoints: ['[::1]:2379'], client"), "is no HOST:PORT"),
        (("address: 10.77.0.1", "address: 10.77.0.2"), "port 2379 of 10.77.0.2 is used by"),
        (
            ("frontends: {hosts: [a, b]", "frontends: {hosts: [a, a]"),
            "a is listed twice: define a second frontend on a machine as another host",
        ),
        (("  b: {address: 10.77.0.2", "  b: {address: 10.77.0.1"), "is used by"),
        (
            ("frontends: {hosts: [a, b]", "frontends: {http_port: 7002, hosts: [a, b]"),
            "port 7002 of 10.77.0.1 is used by the directory's events of host a and the frontend's",
        ),
        (("peer_port: 2380", "peer_port: 2379"), "etcd's clients of host a and etcd's peers"),
        (("etcd: {hosts: [a, b, c], client_port: 2379, peer_port: 2380}\n", ""), "elect a leader"),
        (("hosts: [a, b, c]", "hosts: [a], endpoints: [x:1]"), "either hosts"),
        (("hosts: [a, b, c], client", "endpoints: [x], client"), "is no HOST:PORT"),
        (("role: decode", "role: prefill"), "no pool has the role decode"),
        (("role: decode", "role: encode"), "use prefill or decode"),
        (("threads: 2", "dtype: bfloat16"), "all workers need the same dtype"),
        (("threads: 2", "kv_dtype: fp8"), "all workers need the same kv_dtype"),
        (("{threads: 3}", "{dtype: bfloat16}"), "must be the same in every worker"),
        (("{threads: 3}", "{threads: 300}"), "decode.workers.c[1].threads: is 300; use 1 to 256"),
        (("a: 3, b: 1", "a: 3, d: 1"), "there is no host 'd'"),
        (("a: 3, b: 1", "a: 3000"), "use 0 to 64"),
        (("[{threads: 1}, ", "[" + 64 * "{}, "), "workers.c: lists 65 workers; use 64 or fewer"),
        (("grpc_port: 7100", "grpc_port: 65534"), "the following ports, beyond 65535"),
        (("10.77.0.1}", "10.77.0.1, listen: 127.0.0.1}"), "host a listens on loopback"),
        (("threads: 2", "store_node: a9"), "has no storage node 'a9'"),
        (("{UCX_TLS: tcp", "{MOONCAKE_KEYS: tcp"), "is set by `mooncake serve`"),
        (("{UCX_TLS: tcp", "{UCX-TLS: tcp"), "is no valid name of an environment variable"),
        (("identity: c,", "identity: c, rack: r1,"), "rack is defined twice"),
        (("name: demo", "name: Demo"), "use small letters"),
        (("name: demo", ""), "name: is missing"),
        (("dram: 1G", "dram: 10K"), "use 1M or more"),
        (("ssd: 2G", "ssd: -2G"), "is no size"),
        (("ttl_s: 3", "ttl_s: 0x3"), "write a whole number, 1 to 60"),
        (("port: 7001", "port: 07001"), "write a whole number"),
        (("port: 7001", "port: 9" + 40 * "9"), "write a whole number"),
        (("hosts: [a, b], port", "hosts: {a: b}, port"), "must be a list"),
        (("[e0]", "[e0/1]"), "is no valid name of a network interface"),
        (("threads: 2", "engine: tensorrt_llm, gpus: x"), "gpus: is 'x'; use CUDA device numbers"),
        (("admission: reserved", "ttft_slo_s: 3"), "is set by conductor.ttft_slo_s too"),
        (("admission: reserved", "checkpoint: other"), "is not that of the workers"),
    ],
)
def test_a_mistake_gets_its_remedy(change: tuple[str, str], said: str) -> None:
    assert change[0] in THREE_HOSTS
    found = problems(THREE_HOSTS.replace(*change, 1))
    assert any(said in line for line in found), found
    assert all(line.startswith("line ") for line in found), found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: name: is missing"),
        ("- a\n- b\n", "line 1: must be a mapping"),
        ("just words", "must be a mapping"),
        ("name: demo\n\thosts: {}\n", "line 2: a tab is used for indentation"),
        ("name: [demo\n", "this is no YAML"),
        ("name: demo\n---\nname: other\n", "a second document begins"),
        ("name: !!python/object:os.system demo\n", "the tag"),
        ("? [a, b]\n: c\n", "a key must be a word"),
        ("a: &a [*a]\n", "an alias is inside its own anchor"),
        ("a: &a {b: *a}\n", "an alias is inside its own anchor"),
        ("a: *b\n", "this is no YAML"),
        ("<<: [1, 2]\n", "<< takes a mapping"),
        ("name: a\0b\n", "cannot be in a YAML file"),
        (
            f"a0: &a0 [{'x,' * 10}]\n"
            + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 10}]\n" for n in range(1, 9)),
            "entries after aliases",
        ),
        ("[" * 5_000, "nested"),
        ("x" * (CHARACTERS_MAX + 1), "the limit is"),
    ],
)
def test_what_is_no_tree_of_keys_is_refused_with_a_clear_word(text: str, said: str) -> None:
    assert any(said in line for line in problems(text)), problems(text)


def test_a_second_frontend_of_a_machine_needs_ports_that_exist() -> None:
    text = ONE_HOST.replace(
        "{address: 127.0.0.1}\n", "{address: 127.0.0.1}\n  too: {address: 127.0.0.1}\n"
    )
    text += "frontends: {hosts: [here, too], http_port: 65526}\n"
    said = "line 10: frontends: port 65536 of 127.0.0.1, for the frontend's HTTP of host too, is"
    assert problems(text)[0].startswith(said)
    parse(text.replace("65526", "65525"))


def test_anchors_and_merge_keys_mean_what_yaml_says() -> None:
    text = (
        THREE_HOSTS.replace("hosts:\n", "hosts:\n", 1)
        .replace("a0: {host: a, dram: 256M}", "a0: &node {host: a, dram: 256M}")
        .replace("b0: {host: b, dram: 256M}", "b0: {<<: *node, host: b}")
    )
    node = parse(text).storage_nodes[2]
    assert (node.host, node.dram_bytes) == ("b", 256 << 20)


SHIPPED = templates_in(Path(__file__).parents[3] / "model_repository")
ON_GPUS = templates_in(Path(__file__).parents[3] / "deploy" / "model_repository_trtllm")
TRTLLM = THREE_HOSTS.replace("dtype: float32", "engine: tensorrt_llm, dtype: bfloat16")
VLLM = THREE_HOSTS.replace("dtype: float32", "engine: vllm, dtype: bfloat16")
VLLM_TEMPLATES = templates_in(Path(__file__).parents[3] / "deploy" / "model_repository_vllm")


@pytest.mark.parametrize(
    ("text", "templates", "said"),
    [
        (THREE_HOSTS, SHIPPED, ""),
        (TRTLLM, ON_GPUS, ""),
        (TRTLLM.replace("engine: tensorrt_llm, ", "tp_size: 2, "), ON_GPUS, ""),
        (VLLM, VLLM_TEMPLATES, ""),
        (VLLM.replace("dtype: bfloat16", "dtype: float16, vllm_options: fast.json"), SHIPPED, ""),
        (
            VLLM.replace("engine: vllm, ", "engine: vllm, handoff: store, "),
            VLLM_TEMPLATES,
            "line 17: defaults.handoff: unknown parameter",
        ),
        (
            VLLM.replace("threads: 2", "page_tokens: 64"),
            {},
            "all workers need the same page_tokens to share stored blocks, but have prefill 64, "
            "decode 32",
        ),
        (
            THREE_HOSTS.replace("dtype: float32", "engine: torch, dtype: float32"),
            ON_GPUS,
            "line 15: pools.prefill: its template sets aside_load_mib",
        ),
        (
            TRTLLM.replace("threads: 2", "block_tokens: 16"),
            ON_GPUS,
            "line 15: pools.prefill.block_tokens: (16) must be a multiple of page_tokens (32)",
        ),
        (
            TRTLLM.replace("dtype: bfloat16", "tp_size: 2, gpus: '0'"),
            ON_GPUS,
            "line 17: defaults.gpus: names 1 devices, tp_size is 2",
        ),
        (
            TRTLLM.replace("engine: tensorrt_llm, ", "").replace(
                "threads: 2", "engine: tensorrt_llm"
            ),
            {},
            "all workers need the same engine",
        ),
        (
            THREE_HOSTS.replace("dtype: float32", "dtype: float32, tp_size: 2"),
            SHIPPED,
            "line 17: defaults.tp_size: unknown parameter",
        ),
        (
            TRTLLM.replace("{threads: 3}", "{threads: 3, transfer_s_max: 40}"),
            {name: text.replace('"30"', '"20"') for name, text in ON_GPUS.items()},
            "line 16: pools.decode.workers.c[1].transfer_s_max: (40.0) must be positive and below "
            "lease_s (20.0)",
        ),
    ],
)
def test_parameters_are_checked_with_those_of_the_model_that_a_worker_is_rendered_from(
    text: str, templates: dict[str, str], said: str
) -> None:
    try:
        parse(text, templates=templates)
        found: tuple[str, ...] = ()
    except ClusterFileInvalid as error:
        found = error.problems
    assert any(said in line for line in found) if said else not found, found


def test_words_that_yaml_takes_for_something_else_stay_words() -> None:
    text = ONE_HOST.replace("here", "no").replace("small", "on")
    assert parse(text).name == "on" and list(parse(text).hosts) == ["no"]


def test_a_file_that_is_missing_or_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    with pytest.raises(ClusterFileInvalid, match="No such file"):
        load(path)
    path.write_bytes(b"name: demo\nhosts: \xff\n")
    with pytest.raises(ClusterFileInvalid, match="line 2: byte 0xff is not UTF-8"):
        load(path)
    path.write_bytes(b"\xef\xbb\xbf" + ONE_HOST.encode())
    assert load(path).name == "small", "a mark of UTF-8 at the beginning is fine"


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)


@st.composite
def deployments(draw: st.DrawFn) -> str:
    """The text of a deployment without a mistake."""
    hosts = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    some = st.lists(st.sampled_from(hosts), min_size=1, unique=True)
    lines = [f"name: {draw(NAMES)}", "hosts:"]
    lines += [f"  {host}: {{address: 10.0.0.{n + 1}}}" for n, host in enumerate(hosts)]
    has_etcd = draw(st.booleans())
    if has_etcd:
        lines.append(f"etcd: {{hosts: [{', '.join(draw(some))}]}}")
        lines.append(f"directories: {{hosts: [{', '.join(draw(some))}]}}")
    lines.append("storage_nodes:")
    nodes = [*hosts, *draw(st.lists(st.sampled_from(hosts), max_size=3))]
    for number, host in enumerate(nodes):
        size = draw(st.sampled_from(["64M", "1G", "1234567", "2TiB"]))
        lines.append(f"  n{number}: {{host: {host}, dram: {size}}}")
    lines.append("pools:")
    for role in ("prefill", "decode"):
        counts = ", ".join(f"{host}: {draw(st.integers(0, 4))}" for host in draw(some))
        lines.append(f"  {role}: {{threads: {draw(st.integers(1, 9))}, workers: {{{counts}}}}}")
    lines.append("keys: " + draw(st.sampled_from(["{folder: keys}", "{insecure: true}"])))
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@given(deployments())
@settings(max_examples=50, deadline=None)
def test_any_right_deployment_parses_and_every_host_has_a_plan(text: str) -> None:
    deployment = parse(text)
    plans = [host_plan(deployment, host) for host in deployment.hosts]
    assert sum(len(plan.workers) for plan in plans) == len(deployment.workers)
    assert sum(len(plan.storage_nodes) for plan in plans) == len(deployment.storage_nodes)
    assert len({plan.directory_address for plan in plans}) == 1
    members = [plan.etcd for plan in plans if plan.etcd]
    assert len({member.initial_cluster for member in members}) <= 1


@given(st.sampled_from([THREE_HOSTS, ONE_HOST]), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_a_broken_file_raises_nothing_but_what_names_its_mistakes(
    text: str, chance: random.Random
) -> None:
    alphabet = "{}[]:,&*!#|>'\"%@`-? \n\t\0\u2028\ud800é0aZ~<"
    for _ in range(chance.randint(1, 8)):
        at, length = chance.randrange(len(text)), chance.choice((0, 1, 1, 5, 40))
        put = "".join(chance.choice(alphabet) for _ in range(chance.randint(0, 4)))
        if chance.random() < 0.3:  # some other piece of the file
            start = chance.randrange(len(text))
            put = text[start : start + chance.randint(1, 60)]
        text = text[:at] + put + text[at + length :]
    try:
        deployment = parse(text)
    except ClusterFileInvalid as error:
        assert error.problems and all(line.startswith("line ") for line in error.problems)
    else:
        for host in deployment.hosts:
            host_plan(deployment, host)
