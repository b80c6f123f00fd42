"""What Kubernetes gets when frontends are to serve OpenAI's clients by their API keys."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from backends.cluster.cluster_file import parse
from backends.cluster.command import app
from backends.cluster.deployment import ClusterFileInvalid
from backends.cluster.manifests.kubernetes import api_keys_secret, kustomize_base
from backends.cluster.manifests.pods import PodGateway
from backends.tenants import tenants_file
from tests.backends.cluster.test_manifests import (
    POD_FILE,
    assert_serves,
    checked,
    containers,
    needs_validator,
)

GATEWAY = PodGateway(openai_port=9000, has_api_keys=True)


def test_frontends_alone_mount_the_api_keys_and_serve_clients_on_the_port_of_openai() -> None:
    files = kustomize_base(parse(POD_FILE), POD_FILE, GATEWAY)
    documents = [
        each
        for name, text in files.items()
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(text)
    ]
    found = dict(containers([each for each in documents if "kind" in each]))
    for name, container in found.items():
        assert_serves(container["args"])
        mounted = {each["name"]: each for each in container["volumeMounts"]}
        assert (
            (name == "frontend") == ("api-keys" in mounted) == ("--api-keys" in container["args"])
        )
        assert (name == "frontend") == (
            {"name": "openai", "containerPort": 9000} in container["ports"]
        )
    frontend = found["frontend"]
    path = frontend["args"][frontend["args"].index("--api-keys") + 1]
    mount = next(each for each in frontend["volumeMounts"] if each["name"] == "api-keys")
    assert mount["mountPath"] == os.path.dirname(path) and "subPath" not in mount, "edits arrive"
    named = {
        (each["kind"], each["metadata"]["name"]): each
        for each in documents
        if "kind" in each and "metadata" in each
    }
    spec = named["StatefulSet", "frontend"]["spec"]["template"]["spec"]
    [volume] = [each for each in spec["volumes"] if each["name"] == "api-keys"]
    secret = yaml.safe_load(api_keys_secret(parse(POD_FILE), b"{}"))
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert secret["data"] == {os.path.basename(path): base64.b64encode(b"{}").decode()}
    # What serves refuses a file that others may read; fsGroup makes it the group's.
    assert volume["secret"]["defaultMode"] == 0o440 and spec["securityContext"]["fsGroup"]
    service = named["Service", "frontend-clients"]["spec"]["ports"]
    assert {"name": "openai", "port": 9000, "targetPort": "openai"} in service
    [rule] = named["NetworkPolicy", "frontend-clients"]["spec"]["ingress"]
    assert {"protocol": "TCP", "port": 9000} in rule["ports"]


@pytest.mark.parametrize(
    ("gateway", "names"),
    [
        (PodGateway(), ["http", "grpc"]),
        (PodGateway(9000, True, serves_keyless=True), ["openai"]),
        (PodGateway(9000, True, serves_keyless=False), ["http", "grpc", "openai"]),
        (PodGateway(0, True, serves_keyless=False), ["http", "grpc"]),
    ],
)
def test_with_api_keys_clients_reach_no_port_that_serves_without_one(
    gateway: PodGateway, names: list[str]
) -> None:
    files = kustomize_base(parse(POD_FILE), POD_FILE, gateway)
    documents = [
        document
        for name, text in files.items()
        if name != "cluster.yaml"
        for document in yaml.safe_load_all(text)
    ]
    [service] = [
        each
        for each in documents
        if each["kind"] == "Service" and each["metadata"]["name"].endswith("-clients")
    ]
    [policy] = [
        each
        for each in documents
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"].endswith("-clients")
    ]
    assert [port["name"] for port in service["spec"]["ports"]] == names
    numbers = [port["port"] for port in service["spec"]["ports"]]
    [rule] = policy["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == numbers


@pytest.mark.parametrize(
    ("gateway", "said"),
    [
        (PodGateway(9000), "needs --api-keys"),
        (PodGateway(0, True), "keyless to refused"),
        (PodGateway(8001, True), "frontends use 8001 already"),
    ],
)
def test_a_gateway_that_pods_cannot_have_is_refused(gateway: PodGateway, said: str) -> None:
    with pytest.raises(ClusterFileInvalid, match=said):
        kustomize_base(parse(POD_FILE), POD_FILE, gateway)


def test_api_keys_are_rendered_for_the_owner_only_and_mistakes_of_theirs_are_told(
    tmp_path: Path,
) -> None:
    path, keys = tmp_path / "cluster.yaml", tmp_path / "keys.json"
    path.write_text(POD_FILE)
    command = ["render", "kubernetes", "--cluster", str(path), "--api-keys", str(keys)]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 1 and "mooncake tenants add" in ran.output, ran.output
    assert not (tmp_path / "rendered").exists()
    tenants_file.write(keys, tenants_file.TenantsFile({"acme": tenants_file.TenantEntry()}))
    ran = CliRunner().invoke(app, [*command, "--openai-port", "9000"])
    assert ran.exit_code == 0, ran.output
    rendered = tmp_path / "rendered" / "kubernetes"
    assert stat.S_IMODE((rendered / "api-keys.yaml").stat().st_mode) == 0o600
    made = yaml.safe_load((rendered / "api-keys.yaml").read_text())
    assert base64.b64decode(made["data"]["api-keys.json"]) == keys.read_bytes()
    assert "9000" in (rendered / "base" / "frontend.yaml").read_text()
    keys.chmod(0o644)
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 1 and "too many users have access" in ran.output, ran.output


@needs_validator
def test_kubernetes_takes_a_base_with_api_keys(tmp_path: Path) -> None:
    for name, text in kustomize_base(parse(POD_FILE), POD_FILE, GATEWAY).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "api-keys.yaml").write_text(api_keys_secret(parse(POD_FILE), b"{}"))
    path = tmp_path / "kustomization.yaml"
    path.write_text(path.read_text().replace("resources:\n", "resources:\n- api-keys.yaml\n"))
    ran = checked(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (tmp_path / "api-keys.yaml").write_text("apiVersion: v1\nkind: Secret\ndata: [x]\n")
    assert checked(tmp_path).returncode == 1
