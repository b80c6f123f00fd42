"""What is rendered for other engines is what they take, and starts what exists."""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from backends.cluster.cluster_file import load, parse
from backends.cluster.command import app
from backends.cluster.deployment import ClusterFileInvalid
from backends.cluster.host_plan import host_plan, pool_host_plan
from backends.cluster.manifests import kubernetes
from backends.cluster.manifests.compose import compose
from backends.cluster.manifests.firewall import (
    CLIENTS,
    ELASTIC,
    FLEET,
    FRONTENDS,
    doors,
    firewall,
    table,
)
from backends.cluster.manifests.kubernetes import kustomize_base, secrets
from backends.cluster.manifests.systemd import unit, unit_name
from backends.launcher.command import serve
from backends.metrics.table import METRICS
from bench.harness.fleet import Namespaces, why_no_namespaces
from tests.backends.cluster.fleet_text import ONE_HOST, THREE_HOSTS

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHECKER = KUBERNETES / "check_manifests.py"
VALIDATOR = ROOT / ".venv-kubernetes" / "bin" / "python"
POD_FILE = (KUBERNETES / "base" / "cluster.yaml").read_text()
GROUPS = ("directory", "storage", "frontend", "prefill", "decode")


def options_of_serve() -> set[str]:
    made = typer.Typer()
    made.command()(serve)
    command = typer.main.get_command(made)
    return {option for parameter in command.params for option in parameter.opts}


def assert_serves(command: list[str]) -> None:
    """`mooncake serve` has every option that a manifest gives it."""
    assert command[:2] == ["mooncake", "serve"] or command[0].endswith("/mooncake"), command
    given = {word for word in command if word.startswith("--")}
    assert given and given <= options_of_serve(), command


def test_every_port_of_a_host_is_a_door_with_somebody_who_may_open_it() -> None:
    deployment = parse(THREE_HOSTS)
    found = {door.port: door.who for door in doors(host_plan(deployment, "a"))}
    assert found == {
        2379: FLEET, 2380: "members", 7001: FLEET, 7002: FLEET, 7010: FLEET, 7011: FLEET,
        7012: FLEET, 7013: FLEET, 7100: FRONTENDS, 7101: FRONTENDS, 7102: FRONTENDS,
        8000: CLIENTS, 8001: CLIENTS, 32768: FLEET,
    }  # fmt: skip
    assert all(door.who != CLIENTS for door in doors(host_plan(parse(ONE_HOST), "here"))), (
        "on loopback"
    )


LISTEN = """
import socket
for port in (7001, 40000, 8000, 9999):
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(('0.0.0.0', port)); s.listen(9); globals()[f's{port}'] = s
print('ready', flush=True); input()
"""
ASK = """
import socket, sys
for port in (7001, 40000, 8000, 9999):
    try: socket.create_connection((sys.argv[1], port), timeout=1).close()
    except OSError: continue
    print(port)
"""
# A server whose client, in the range of free ports, is behind rules that are loaded meanwhile.
SPEAK = """
import socket
s = socket.create_server(('0.0.0.0', 9998)); print('ready', flush=True)
peer = s.accept()[0]; print('met', flush=True)
input(); peer.sendall(b'answer'); input()
"""
HEAR = """
import socket, sys
s = socket.socket(); s.bind(('0.0.0.0', 40001)); s.settimeout(9)
s.connect((sys.argv[1], 9998)); print(s.recv(6).decode(), flush=True)
"""


@contextlib.contextmanager
def program(hosts: Namespaces, host: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Runs on that host until the block ends."""
    python = shutil.which("python3") or "python3"
    started = subprocess.Popen(
        hosts.command(host, [python, "-c", *command]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def line_of(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def reached(hosts: Namespaces, principal: str, asked: str) -> list[str]:
    with program(hosts, principal, ASK, hosts.address(asked)) as started:
        return started.communicate()[0].split()


@pytest.mark.servers
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft")
def test_the_rules_open_a_port_to_hosts_and_to_nobody_else(tmp_path: Path) -> None:
    with Namespaces(("a", "b", "c")) as hosts:
        text = (
            f"name: demo\nhosts: {{a: {{address: {hosts.address('a')}}}, "
            f"b: {{address: {hosts.address('b')}}}}}\n"
            "storage_nodes: {a0: {host: a, dram: 64M}, b0: {host: b, dram: 64M}}\n"
            "frontends: {address: 0.0.0.0}\n"
            "pools: {prefill: {workers: {a: 1}}, decode: {elastic: {}}}\n"
            "keys: {insecure: true}\n"
        )
        deployment = parse(text)
        rules = tmp_path / "rules.nft"
        rules.write_text(firewall(deployment, host_plan(deployment, "a")))
        load_rules = hosts.command("a", ["nft", "-f", str(rules)])
        everything, for_all = ["7001", "40000", "8000", "9999"], ["8000", "9999"]
        with program(hosts, "a", LISTEN) as listener, program(hosts, "c", SPEAK) as speaker:
            assert (line_of(listener), line_of(speaker)) == ("ready", "ready")
            with program(hosts, "a", HEAR, hosts.address("c")) as hearer:
                assert line_of(speaker) == "met"
                subprocess.run(load_rules, check=True)
                assert speaker.stdin is not None
                speaker.stdin.write("\n")
                speaker.stdin.flush()
                assert line_of(hearer) == "answer", "of a connection that was there before"
            assert reached(hosts, "a", "c") == [] and reached(hosts, "b", "a") == everything
            assert reached(hosts, "c", "a") == for_all, "clients' port, and what is not ours"
            element = ["add", "element", *table(deployment).split(), ELASTIC]
            elastic = ["nft", *element, f"{{ {hosts.address('c')} }}"]
            subprocess.run(hosts.command("a", elastic), check=True)
            assert reached(hosts, "c", "a") == everything, "a host of an elastic pool"
            subprocess.run(load_rules, check=True)
            assert reached(hosts, "c", "a") == everything, "what was said of it stays"
            elastic[1] = "delete"
            subprocess.run(hosts.command("a", elastic), check=True)
            assert reached(hosts, "c", "a") == for_all


def test_two_hosts_of_one_machine_have_one_table_and_two_units() -> None:
    text = THREE_HOSTS.replace("  b: {", "  a2: {address: 10.77.0.1}\n  b: {", 1)
    deployment = parse(text.replace("frontends: {hosts: [a, b]", "frontends: {hosts: [a, a2]"))
    a, a2 = (firewall(deployment, host_plan(deployment, name)) for name in ("a", "a2"))
    assert a.splitlines()[1:] == a2.splitlines()[1:], "the second load replaces the first"
    assert "tcp dport 8000 accept" in a and "tcp dport 8010 accept" in a
    assert [unit_name(deployment, name) for name in ("a", "a2")] == [
        "mooncake-demo.service",
        "mooncake-demo-a2.service",
    ]
    with pytest.raises(ClusterFileInvalid, match="an address of its own"):
        compose(deployment)


def test_an_elastic_host_opens_its_worker_and_its_node_to_those_of_the_file() -> None:
    deployment = parse(THREE_HOSTS.replace("slots: 16", "slots: 16, elastic: {}"))
    text = firewall(deployment, pool_host_plan(deployment, "decode", "pod", "10.77.0.9"))
    assert "ip saddr { 10.77.0.1, 10.77.0.2 } tcp dport 7200 accept" in text, "frontends"
    assert "ip saddr { 10.77.0.1, 10.77.0.2, 10.77.0.3 } tcp dport 7010 accept" in text
    assert "ip saddr @elastic tcp dport 7011 accept" in text
    assert "tcp dport { 7010, 7011, 7200, 32768-60999 }" in text


def test_rules_need_addresses() -> None:
    text = THREE_HOSTS.replace("address: 10.77.0.3", "address: c.example")
    with pytest.raises(ClusterFileInvalid, match="c have DNS names"):
        firewall(parse(text), host_plan(parse(text), "a"))


def test_a_unit_starts_the_host_and_systemd_finds_no_fault(tmp_path: Path) -> None:
    deployment = parse(THREE_HOSTS, "cluster.yaml")
    program = shutil.which("true") or "true"
    text = unit(deployment, host_plan(deployment, "b"), program, str(tmp_path), "root")
    command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(command.removeprefix("ExecStart="))
    assert words[1:] == ["serve", "--cluster", f"{tmp_path}/cluster.yaml", "--host", "b"]
    assert_serves(["mooncake", *words[1:]])
    if shutil.which("systemd-analyze"):
        path = tmp_path / "mooncake-demo.service"
        path.write_text(text)
        checked = subprocess.run(
            ["systemd-analyze", "verify", str(path)], capture_output=True, text=True
        )
        assert checked.returncode == 0 and "mooncake" not in checked.stderr, checked.stderr


def test_every_host_is_a_service_with_its_own_address_and_memory() -> None:
    made = yaml.safe_load(compose(parse(THREE_HOSTS, "fleet/cluster.yaml")))
    assert set(made["services"]) == {"a", "b", "c"}
    subnet = made["networks"]["fleet"]["ipam"]["config"][0]
    assert subnet["subnet"] == "10.77.0.0/24" and subnet["gateway"] == "10.77.0.254"
    far = THREE_HOSTS.replace("10.77.0.3", "10.255.255.254")
    [subnet] = yaml.safe_load(compose(parse(far)))["networks"]["fleet"]["ipam"]["config"]
    assert subnet == {"subnet": "10.0.0.0/8", "gateway": "10.255.255.253"}
    with pytest.raises(ClusterFileInvalid, match="larger than /8"):
        compose(parse(THREE_HOSTS.replace("10.77.0.3", "192.168.0.3")))
    for name, service in made["services"].items():
        assert_serves(service["command"])
        assert service["command"][-1] == name
        assert f"state-{name}:/var/lib/mooncake" in service["volumes"]
        assert any(volume.startswith(f"../../keys/{name}:") for volume in service["volumes"])
    a = made["services"]["a"]
    assert a["networks"]["fleet"]["ipv4_address"] == "10.77.0.1"
    assert a["shm_size"] == (256 << 20) + (1 << 30) + (1 << 30)
    assert a["ports"] == ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001"]
    assert made["services"]["b"]["ports"][0] == "127.0.0.1:8010:8000"
    assert "ports" not in made["services"]["c"]
    with pytest.raises(ClusterFileInvalid, match="that are not loopback"):
        compose(parse(ONE_HOST))
    text = THREE_HOSTS.replace("dram: 1G,", "dram: 1G, segment_path: /dev/hugepages/a1,")
    made = yaml.safe_load(compose(parse(text, "fleet/cluster.yaml")))
    assert made["services"]["a"]["shm_size"] == (256 << 20) + (1 << 30)


def volumes_of(text: str, host: str = "b") -> dict[str, str]:
    """What a container of a Compose file sees, by path; and where that is for who starts it."""
    made = yaml.safe_load(compose(parse(text, "fleet/cluster.yaml")))
    volumes = [volume.split(":") for volume in made["services"][host]["volumes"]]
    assert all(each[2:] == ["ro"] for each in volumes[1:]), "only state is written"
    return {each[1]: each[0] for each in volumes}


FAST = ("/var/lib/mooncake/fast.json", "../../fast.json")  # in the container, beside the file


@pytest.mark.parametrize(
    ("change", "inside", "outside"),
    [
        (
            ("checkpoint: demo", "checkpoint: models/q"),
            "/var/lib/mooncake/models/q",
            "../../models/q",
        ),
        (("checkpoint: demo", "checkpoint: ../q"), "/var/lib/q", "../../../q"),
        (("checkpoint: demo", "checkpoint: /models/q"), "/models/q", "/models/q"),
        (("checkpoint: demo", "llm_options: fast.json, engine: tensorrt_llm"), *FAST),
        (("checkpoint: demo", "vllm_options: fast.json, engine: vllm"), *FAST),
        (("folder: keys", "folder: /etc/keys"), "/etc/keys/b", "/etc/keys/b"),
        (
            ("folder: keys", "folder: ./own/keys/"),
            "/var/lib/mooncake/own/keys/b",
            "../../own/keys/b",
        ),
    ],
)  # fmt: skip)
def test_containers_see_keys_and_checkpoint_where_the_cluster_file_says(
    change: tuple[str, str], inside: str, outside: str
) -> None:
    assert change[0] in THREE_HOSTS
    assert volumes_of(THREE_HOSTS.replace(*change))[inside] == outside
    assert set(volumes_of(THREE_HOSTS)) == {
        "/var/lib/mooncake",
        "/var/lib/mooncake/cluster.yaml",
        "/var/lib/mooncake/keys/b",
    }
    with pytest.raises(ClusterFileInvalid, match="a path that begins with /"):
        compose(parse(THREE_HOSTS.replace("checkpoint: demo", "checkpoint: ~/q")))


def test_containers_run_as_who_may_read_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(THREE_HOSTS)
    for host in ("a", "b"):
        (tmp_path / "keys" / host).mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(tmp_path / "keys" / "b", 4321, -1)
    ran = CliRunner().invoke(app, ["render", "compose", "--cluster", str(path)])
    assert ran.exit_code == 0 and "no keys of c" in ran.output, ran.output
    made = yaml.safe_load((tmp_path / "rendered" / "compose" / "compose.yaml").read_text())
    users = {name: each["user"] for name, each in made["services"].items()}
    b = 4321 if os.getuid() == 0 else os.getuid()
    assert users == {
        "a": f"${{MOONCAKE_USER:-{os.getuid()}}}",
        "b": f"${{MOONCAKE_USER:-{b}}}",
        "c": "${MOONCAKE_USER:-1000}",
    }
    # Nobody by such a number is known in the image: its folder must be anybody's.
    assert made["services"]["b"]["environment"] == {"HOME": "/var/lib/mooncake", "USER": "mooncake"}
    assert "chmod 1777 /var/lib/mooncake" in (ROOT / "deploy" / "Dockerfile").read_text()


def containers(documents: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (each["metadata"]["name"], container)
        for each in documents
        if each["kind"] in ("StatefulSet", "Deployment")
        for container in each["spec"]["template"]["spec"]["containers"]
    ]


def base_documents(text: str = POD_FILE) -> list[Any]:
    files = kustomize_base(parse(text), text)
    return [
        document
        for name, content in files.items()
        if name not in ("cluster.yaml", "kustomization.yaml")
        for document in yaml.safe_load_all(content)
    ]


def test_the_committed_base_is_what_its_cluster_file_renders() -> None:
    deployment = load(KUBERNETES / "base" / "cluster.yaml")
    rendered = {
        "base": kustomize_base(deployment, POD_FILE),
        "monitoring": kubernetes.monitoring_component(deployment),
    }
    for folder, files in rendered.items():
        there = {path.name: path.read_text() for path in (KUBERNETES / folder).iterdir()}
        assert there == files, "mooncake cluster render kubernetes, and copy rendered/kubernetes"


def test_pods_start_what_exists_and_all_hosts_of_the_file_are_pods() -> None:
    deployment = parse(POD_FILE)
    documents = base_documents()
    found = dict(containers(documents))
    assert set(found) == {"directory", "storage", "frontend", "prefill", "decode"}
    for container in found.values():
        assert_serves(container["args"])
        names = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in names
    drain = found["storage"]["lifecycle"]["preStop"]["exec"]["command"][2]
    assert drain.startswith('exec mooncake cluster drain "$POD_NAME" --cluster ')
    pods = {
        f"{each['metadata']['name']}-{number}"
        for each in documents
        if each["kind"] == "StatefulSet"
        for number in range(each["spec"]["replicas"])
    }
    assert pods == set(deployment.hosts)


def test_pods_are_lent_the_gpus_of_their_workers_and_memory_for_what_lies_in_it() -> None:
    text = (KUBERNETES / "overlays" / "rdma" / "cluster.yaml").read_text()
    text = text.replace("engine: tensorrt_llm,", "engine: tensorrt_llm, tp_size: 2,")
    found = dict(containers(base_documents(text)))
    gpus = {name: each["resources"]["limits"].get("nvidia.com/gpu") for name, each in found.items()}
    assert gpus == {each: "2" if each in ("prefill", "decode") else None for each in GROUPS}
    memory = int(found["storage"]["resources"]["limits"]["memory"])
    assert memory < 4 << 30, "its segment is in huge pages, which are counted apart"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_pods_with_rdma_have_what_their_cluster_file_asks_for() -> None:
    folder = KUBERNETES / "overlays" / "rdma"
    built = subprocess.run(
        ["kubectl", "kustomize", str(folder)], check=True, capture_output=True, text=True
    )
    documents = [
        each
        for each in yaml.safe_load_all(built.stdout)
        if each["kind"] in ("StatefulSet", "Deployment")
    ]
    asked = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in base_documents((folder / "cluster.yaml").read_text())
        if each["kind"] in ("StatefulSet", "Deployment")
    }
    images = {}
    for document in documents:
        name, spec = document["metadata"]["name"], document["spec"]["template"]["spec"]
        (container,), (theirs,) = spec["containers"], asked[name]["containers"]
        images[name] = container["image"].rpartition("/")[2].partition(":")[0]
        assert {each["image"] for each in spec["initContainers"]} == {container["image"]}
        limits, wanted = container["resources"]["limits"], theirs["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == wanted.get("nvidia.com/gpu"), name
        assert byte_count(limits["memory"]) >= byte_count(wanted["memory"]), name
        assert shm_limit(spec) >= shm_limit(asked[name]), name
        if "IPC_LOCK" in container["securityContext"]["capabilities"].get("add", []):
            assert spec["securityContext"]["runAsUser"] == 0, "it has no effect for others"
            assert not spec["securityContext"]["runAsNonRoot"]
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    trtllm, cpu = "mooncake-trtllm", "mooncake"
    assert images == {each: cpu if each in ("directory", "frontend") else trtllm for each in GROUPS}
    assert "etcd-server" in (ROOT / "deploy" / "Dockerfile").read_text(), "directories' pods run it"


def byte_count(text: str) -> int:
    return int(text.removesuffix("Gi")) << 30 if text.endswith("Gi") else int(text)


def shm_limit(spec: dict[str, Any]) -> int:
    (shm,) = (volume for volume in spec["volumes"] if volume["name"] == "shm")
    return byte_count(shm["emptyDir"]["sizeLimit"])


def test_every_group_and_pool_has_a_budget_and_a_selector_that_finds_its_pods() -> None:
    documents = base_documents()
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in documents
        if each["kind"] in ("StatefulSet", "Deployment")
    }
    budgets = {
        each["metadata"]["name"]: each["spec"]["selector"]["matchLabels"]
        for each in documents
        if each["kind"] == "PodDisruptionBudget"
    }
    assert budgets == pods
    for each in documents:
        chosen = each["spec"].get("selector") or each["spec"].get("podSelector")
        chosen = chosen.get("matchLabels", chosen)
        assert any(chosen.items() <= labels.items() for labels in pods.values()), each["metadata"]


def test_pools_scale_by_metrics_that_are_on_our_page() -> None:
    files = kubernetes.monitoring_component(parse(POD_FILE))
    scalers = list(yaml.safe_load_all(files["autoscaling.yaml"]))
    names = {
        metric[metric["type"].lower()]["metric"]["name"]
        for scaler in scalers
        for metric in scaler["spec"]["metrics"]
    }
    assert names == {kubernetes.LIVE, kubernetes.WAITING}
    assert names <= set(METRICS)
    assert [(s["spec"]["minReplicas"], s["spec"]["maxReplicas"]) for s in scalers] == [(2, 8)] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"storage-1": "storage-2"}, "count from 0 without gaps"),
        ({"storage-1:": "disk-0:", "host: storage-1": "host: disk-0"}, "a pod's is disk-0"),
        ({"frontend-1": "front"}, "are named NAME-0"),
        ({"storage-0": "storage-00"}, "are named NAME-0"),
        ({"\n  address: 0.0.0.0": "\n  address: 127.0.0.1"}, "the service for clients calls it"),
        ({"metrics_address: 0.0.0.0": "metrics_address: 127.0.0.1"}, "probes call it"),
        ({"storage-1.storage}": "storage-1.storage, state_dir: /x}"}, "state_dir: must be in"),
        ({"storage-1, dram: 4G": "storage-1, dram: 5G"}, "storage-0 run different parts"),
        ({"  prefill: {role": "  storage: {role"}, "is also a group of hosts"),
    ],
)
def test_hosts_that_cannot_be_pods_are_named(changes: dict[str, str], said: str) -> None:
    text = POD_FILE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(ClusterFileInvalid, match=said):
        kustomize_base(parse(text), text)


def test_a_group_of_pods_gets_the_keys_of_its_own_hosts_only(tmp_path: Path) -> None:
    deployment = parse(POD_FILE, str(tmp_path / "cluster.yaml"))
    keys = tmp_path / "keys"
    with pytest.raises(ClusterFileInvalid, match=r"no keys of directory-0, .*, prefill, decode"):
        secrets(deployment, keys)
    for name in (*deployment.hosts, "prefill", "decode", "authority"):
        (keys / name).mkdir(parents=True)
        (keys / name / "host.key").write_text(f"secret of {name}")
    made = {
        each["metadata"]["name"]: each["data"]
        for each in yaml.safe_load_all(secrets(deployment, keys))
    }
    assert set(made) == {f"keys-{group}" for group in GROUPS}
    assert set(made["keys-storage"]) == {"storage-0.host.key", "storage-1.host.key"}
    assert base64.b64decode(made["keys-prefill"]["host.key"]) == b"secret of prefill"


@pytest.mark.parametrize(
    ("pod", "files", "taken"),
    [
        ("storage-1", ("storage-0.host.key", "storage-1.host.key"), "storage-1.host.key"),
        ("decode-7f9-x2", ("host.key",), "host.key"),
    ],
)
def test_the_keys_of_a_pod_are_copied_out_of_its_secret_readable_by_nobody_else(
    tmp_path: Path, pod: str, files: tuple[str, ...], taken: str
) -> None:
    document = next(
        each
        for each in base_documents()
        if each["metadata"]["name"] == "storage" and each["kind"] == "StatefulSet"
    )
    (copier,) = document["spec"]["template"]["spec"]["initContainers"]
    script = copier["command"][2].replace("/secret", str(tmp_path / "secret"))
    script = script.replace("/keys/", f"{tmp_path}/keys/")
    for name in ("secret", "keys"):
        (tmp_path / name).mkdir()
    for name in files:
        (tmp_path / "secret" / name).write_text(name)
    subprocess.run([*copier["command"][:2], script], env=os.environ | {"POD_NAME": pod}, check=True)
    (path,) = (tmp_path / "keys").iterdir()
    assert (path.name, path.read_text()) == ("host.key", taken)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_render_writes_below_the_cluster_file_and_secrets_for_the_owner_only(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(POD_FILE)
    for name in (*parse(POD_FILE).hosts, "prefill", "decode"):
        (tmp_path / "keys" / name).mkdir(parents=True)
        (tmp_path / "keys" / name / "ca.pem").write_text("x")
    ran = CliRunner().invoke(app, ["render", "kubernetes", "--cluster", str(path)])
    assert ran.exit_code == 0, ran.output
    rendered = tmp_path / "rendered" / "kubernetes"
    assert (rendered / "base" / "cluster.yaml").read_text() == POD_FILE
    assert stat.S_IMODE((rendered / "secrets.yaml").stat().st_mode) == 0o600
    path.write_text(THREE_HOSTS)
    for kind in ("compose", "systemd", "firewall"):
        ran = CliRunner().invoke(app, ["render", kind, "--cluster", str(path)])
        assert ran.exit_code == 0, ran.output
    assert (tmp_path / "rendered" / "compose" / "compose.yaml").exists()
    assert (tmp_path / "rendered" / "c" / "mooncake-demo.service").exists()
    assert (tmp_path / "rendered" / "b" / "firewall.nft").exists()
    ran = CliRunner().invoke(app, ["render", "kubernetes", "--cluster", str(path)])
    assert ran.exit_code == 1 and "pods of a StatefulSet" in ran.output


def checked(*folders: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(VALIDATOR), str(CHECKER), *map(str, folders)], capture_output=True, text=True
    )


needs_validator = pytest.mark.skipif(
    not VALIDATOR.exists() or shutil.which("kubectl") is None,
    reason="needs kubectl and `make kubernetes-check`",
)


@needs_validator
def test_kubernetes_takes_the_base_and_every_overlay() -> None:
    folders = [KUBERNETES / "base", *sorted((KUBERNETES / "overlays").iterdir())]
    assert len(folders) >= 4
    ran = checked(*folders)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_validator
@pytest.mark.parametrize(
    ("resource", "said"),
    [
        (
            {"apiVersion": "example.com/v1", "kind": "Wonder", "metadata": {"name": "x"}},
            "nobody knows the kind Wonder",
        ),
        (
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "ServiceMonitor",
                "metadata": {"name": "x"},
                "spec": {"selector": {}, "endpoint": []},
            },
            "endpoint",
        ),
        (
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "x"},
                "spec": {"port": []},
            },
            "port",
        ),
    ],
)  # fmt: skip)
def test_an_unknown_kind_or_field_fails(
    tmp_path: Path, resource: dict[str, Any], said: str
) -> None:
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(resource))
    (tmp_path / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [x.yaml]\n"
    )
    ran = checked(tmp_path)
    assert ran.returncode == 1 and said in ran.stdout, ran.stdout
