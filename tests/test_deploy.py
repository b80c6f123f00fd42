"""What deploy/ has is what the code understands: parameters, comments, names of files."""

from __future__ import annotations

import dataclasses
import itertools
import re
from fnmatch import fnmatch
from pathlib import Path, PurePath

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from backends.config_pbtxt import FrontendConfig, read_configs
from backends.extras import MODULES
from backends.triton.worker_kinds import read_worker_configs
from conductor.config import ConductorConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
WORKERS = ("prefill_0", "decode_0")


def parsed(path: Path) -> ModelConfig:
    return text_format.Parse(path.read_text(), ModelConfig())


def raw(config: ModelConfig) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}


@pytest.mark.parametrize("model", WORKERS)
def test_workers_on_tensorrt_llm_state_every_parameter_that_matters(model: str) -> None:
    path = DEPLOY / "model_repository_trtllm" / model / "config.pbtxt"
    config, role = parsed(path), model.split("_")[0]
    worker, trtllm = read_worker_configs(role, model, raw(config), 1)
    assert worker.engine == "tensorrt_llm"
    stated = {field.name for field in dataclasses.fields(trtllm)}
    assert stated <= raw(config).keys()
    lines = path.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if line.startswith("parameters"):
            assert above.startswith("# "), f"{model}: say what this does: {line}"
    theirs = parsed(ROOT / "model_repository" / model / "config.pbtxt")
    assert (config.input, config.output, config.backend) == (
        theirs.input,
        theirs.output,
        theirs.backend,
    )
    assert (path.parent / "1" / ".gitkeep").exists()


def test_prefill_and_decode_agree_on_what_makes_a_fingerprint() -> None:
    both = [
        raw(parsed(DEPLOY / "model_repository_trtllm" / model / "config.pbtxt"))
        for model in WORKERS
    ]
    for name in ("checkpoint", "dtype", "block_tokens", "page_tokens", "tp_size", "handoff"):
        assert both[0][name] == both[1][name], name


def test_the_conductor_takes_what_is_appended_for_it() -> None:
    text = (ROOT / "model_repository" / "conductor" / "config.pbtxt").read_text()
    config = text_format.Parse(
        text + (DEPLOY / "conductor_trtllm.pbtxt").read_text(), ModelConfig()
    )
    _, conductor = read_configs((FrontendConfig, ConductorConfig), "conductor", raw(config))
    assert not conductor.queue_preempts
    assert (conductor.admission, conductor.policy) == ("predictive_lengths", "adaptive")
    ours = ConductorConfig()
    assert (ours.admission, ours.policy) == ("reserved", "kvcache_centric"), "scenarios rely on it"


def copied(dockerfile: str) -> dict[str, str]:
    """Where each source of its COPY lines goes, below the image's folder."""
    found = {}
    for line in re.findall(r"^COPY (.*)$", (DEPLOY / dockerfile).read_text(), re.MULTILINE):
        *sources, target = line.split()
        found |= dict.fromkeys(sources, target)
    return found


def is_in_context(path: str) -> bool:
    """As docker reads .dockerignore: the last line that names a path or a folder above it wins."""
    is_in = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            above = [PurePath(path), *PurePath(path).parents][:-1]  # without the context itself
            names = [each.name if "**/" in line else str(each) for each in above]
            if any(fnmatch(name, pattern) for name in names):
                is_in = line.startswith("!")
    return is_in


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.trtllm"])
def test_an_image_copies_what_it_needs_by_name_and_gets_it(dockerfile: str) -> None:
    sources = copied(dockerfile)
    assert sources and all((ROOT / source).exists() for source in sources), sources
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    packages = found - {"bench", "tests", "tools"}
    assert packages <= sources.keys(), "pip installs what is in src/"
    assert {"pyproject.toml", "README.md", "LICENSE", "model_repository"} <= sources.keys()
    assert all(is_in_context(source) for source in sources), sources
    assert not sources.keys() & {".", "deploy", "tests"}, "an image has nothing else of ours"
    text = (DEPLOY / dockerfile).read_text()
    for path in re.findall(r"src/(deploy/[\w./]*\w)", text):
        assert sources[path] in (f"src/{path}", f"src/{path.rpartition('/')[0]}/"), path
    command = re.search(r"^CMD (\[.*)$", text, re.MULTILINE)
    assert command is not None and "mooncake" in command[1]


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.trtllm"])
def test_an_image_installs_the_extras_that_serving_needs(dockerfile: str) -> None:
    [drawn] = re.findall(r"'\./src\[([a-z,-]+)\]'", (DEPLOY / dockerfile).read_text())
    extras = set(drawn.split(","))
    assert extras <= MODULES.keys()
    assert {"gateway"} < extras and ("torch" in extras or "nixl" in extras)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        "keys/authority/ca.key",
        "deploy/kubernetes/base/keys/frontend-0/host.key",
        "deploy/kubernetes/base/rendered/kubernetes/secrets.yaml",
        ".mooncake/etcd-a",
        "cluster.yaml",
        "rendered/a/manifest.json",
        "backends/__pycache__/cli.cpython-311.pyc",
        "tests/conftest.py",
        ".venv/bin/python",
        "checkpoint/model.safetensors",
        "deploy/README.md",
    ],
)
def test_keys_state_and_what_else_lies_about_never_reach_a_builder(path: str) -> None:
    assert not is_in_context(path)
