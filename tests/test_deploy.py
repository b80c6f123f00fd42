"""What deploy/ has is what the code understands: parameters, comments, names of files."""

from __future__ import annotations

import dataclasses
import itertools
import re
from fnmatch import fnmatch
from pathlib import Path, PurePath

import pytest
from google.protobuf import text_format
from packaging.specifiers import SpecifierSet
from tritonclient.grpc.model_config_pb2 import ModelConfig

from backends.cluster.cluster_file import FINGERPRINT
from backends.cluster.host_plan import needs_own_gpus
from backends.config_pbtxt import FrontendConfig, read_configs
from backends.engine.interpreter import VLLM_SUPPORTED
from backends.extras import MODULES
from backends.triton.worker_kinds import read_worker_configs
from conductor.config import ConductorConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
WORKERS = ("prefill_0", "decode_0")
FOLDERS = {"model_repository_trtllm": "tensorrt_llm", "model_repository_vllm": "vllm"}
DOCKERFILES = ("Dockerfile", "Dockerfile.trtllm", "Dockerfile.vllm")


def parsed(path: Path) -> ModelConfig:
    return text_format.Parse(path.read_text(), ModelConfig())


def raw(config: ModelConfig) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}


@pytest.mark.parametrize("model", WORKERS)
@pytest.mark.parametrize(("folder", "engine"), FOLDERS.items())
def test_workers_on_another_engine_state_every_parameter_of_it(
    folder: str, engine: str, model: str
) -> None:
    path = DEPLOY / folder / model / "config.pbtxt"
    config, role = parsed(path), model.split("_")[0]
    worker, of_engine = read_worker_configs(role, model, raw(config), 1)
    assert worker.engine == engine and needs_own_gpus(raw(config))
    stated = {field.name for field in dataclasses.fields(of_engine)}
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_prefill_and_decode_agree_on_what_makes_a_fingerprint(folder: str) -> None:
    both = [raw(parsed(DEPLOY / folder / model / "config.pbtxt")) for model in WORKERS]
    for name in FINGERPRINT:
        assert both[0].get(name) == both[1].get(name), name


def test_the_shipped_conductor_decides_with_what_its_file_says() -> None:
    text = (ROOT / "model_repository" / "conductor" / "config.pbtxt").read_text()
    config = text_format.Parse(text, ModelConfig())
    _, conductor = read_configs((FrontendConfig, ConductorConfig), "conductor", raw(config))
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


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
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


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_an_image_installs_the_extras_that_serving_needs(dockerfile: str) -> None:
    [drawn] = re.findall(r"'\./src\[([a-z,-]+)\]'", (DEPLOY / dockerfile).read_text())
    extras = set(drawn.split(","))
    assert extras <= MODULES.keys()
    assert {"gateway"} < extras and ("torch" in extras or "nixl" in extras)


def test_the_image_for_vllm_accepts_the_versions_that_the_engine_supports() -> None:
    [accepted] = re.findall(r"grep -qE '(\S+)' keep.txt", (DEPLOY / "Dockerfile.vllm").read_text())
    for version in ("0.31.4", "0.32.0", "0.33.1.dev3", "0.34.0", "0.320.0", "1.0.0"):
        is_supported = SpecifierSet(VLLM_SUPPORTED).contains(version, prereleases=True)
        line = re.compile(accepted, re.MULTILINE)
        assert bool(line.search(f"torch==2.13.0\nvllm=={version}\n")) == is_supported, version


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
