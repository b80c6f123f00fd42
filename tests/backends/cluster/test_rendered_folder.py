"""Model repositories are rendered from the cluster file, and an operator's edits win meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig
from typer.testing import CliRunner

from backends.cluster.cluster_file import parse
from backends.cluster.command import app
from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import host_plan
from backends.cluster.model_rendering import TemplateMissing, with_parameters
from backends.cluster.rendered_folder import RenderedFolder
from backends.config_pbtxt import FrontendConfig, TokenizerConfig, read_configs
from backends.triton.worker_kinds import read_worker_configs
from conductor.config import ConductorConfig
from tests.backends.cluster.fleet_text import THREE_HOSTS

BASE = Path(__file__).parents[3] / "model_repository"


def deployment_in(folder: Path, text: str = THREE_HOSTS) -> Deployment:
    return parse(text, str(folder / "cluster.yaml"))


def folder_of(folder: Path, host: str = "b", text: str = THREE_HOSTS) -> RenderedFolder:
    deployment = deployment_in(folder, text)
    return RenderedFolder(deployment, host_plan(deployment, host), BASE)


def config(folder: RenderedFolder, model: str) -> ModelConfig:
    text = (folder.repository / model / "config.pbtxt").read_text()
    return text_format.Parse(text, ModelConfig())


def raw(folder: RenderedFolder, model: str) -> dict[str, str]:
    return {name: value.string_value for name, value in config(folder, model).parameters.items()}


def edit(folder: RenderedFolder, model: str, before: str, after: str) -> None:
    path = folder.repository / model / "config.pbtxt"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))


def test_a_host_gets_its_models_and_their_parameters(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.write(keeps_edits=True)
    assert {path.parent.name for path in folder.repository.glob("*/1")} == {
        "conductor",
        "ensemble",
        "preprocessing",
        "postprocessing",
        "prefill_b_0",
        "decode_b_0",
    }
    (prefill,) = read_worker_configs("prefill", "prefill_b_0", raw(folder, "prefill_b_0"), 1)
    assert (prefill.threads, prefill.store_node, prefill.kv_bytes) == (2, "b0", 256 * 2**20)
    (decode,) = read_worker_configs("decode", "decode_b_0", raw(folder, "decode_b_0"), 1)
    assert (decode.slots, decode.store_node) == (16, "b0")
    frontend, conductor = read_configs(
        (FrontendConfig, ConductorConfig), "conductor", raw(folder, "conductor")
    )
    assert (conductor.ttft_slo_s, conductor.admission) == (20, "reserved")
    assert frontend.checkpoint == "demo"
    shipped = text_format.Parse((BASE / "prefill_0" / "config.pbtxt").read_text(), ModelConfig())
    ours = config(folder, "prefill_b_0")
    assert (ours.input, ours.output, ours.backend) == (
        shipped.input,
        shipped.output,
        shipped.backend,
    )
    comments = [
        line
        for line in (BASE / "prefill_0" / "config.pbtxt").read_text().splitlines()
        if line.startswith("# ")
    ]
    rendered = (folder.repository / "prefill_b_0" / "config.pbtxt").read_text().splitlines()
    assert set(comments) <= set(rendered), "what a parameter means stays beside it"


def test_workers_on_gpus_share_those_of_their_host_whatever_the_template_names(
    tmp_path: Path,
) -> None:
    base = BASE.parent / "deploy" / "model_repository_trtllm"  # decode_0 is on GPU 1 there
    on_gpus = "engine: tensorrt_llm, tp_size: 2, dtype: bfloat16"
    text = THREE_HOSTS.replace("dtype: float32", on_gpus)
    deployment = deployment_in(tmp_path, text)
    on_b = RenderedFolder(deployment, host_plan(deployment, "b"), base)
    on_b.write(keeps_edits=True)
    assert raw(on_b, "prefill_b_0")["gpus"] == "0,1"
    assert raw(on_b, "decode_b_0")["gpus"] == "2,3"
    on_c = RenderedFolder(deployment, host_plan(deployment, "c"), base)
    on_c.write(keeps_edits=True)
    assert [raw(on_c, f"decode_c_{n}")["gpus"] for n in (0, 1)] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("env/bin/python", "../../env/bin/python"),
        ("/opt/python", "/opt/python"),
        ("~/env/bin/python", "~/env/bin/python"),
    ],
)
def test_paths_of_vllm_start_at_the_folder_of_the_cluster_file(
    tmp_path: Path, named: str, found: str
) -> None:
    of_vllm = f"engine: vllm, engine_python: {named}, vllm_options: fast.json"
    folder = folder_of(tmp_path, text=THREE_HOSTS.replace("checkpoint: demo", of_vllm))
    folder.write(keeps_edits=True)
    for model in ("prefill_b_0", "decode_b_0"):
        parameters = raw(folder, model)
        assert (parameters["engine_python"], parameters["vllm_options"]) == (
            found,
            "../../fast.json",
        )
        assert "gpus" not in parameters, "device is cpu"
    in_place = THREE_HOSTS.replace(
        "checkpoint: demo", "engine: vllm, vllm_options: '{\"seed\": 1}'"
    )
    folder = folder_of(tmp_path / "in_place", text=in_place)
    folder.write(keeps_edits=True)
    assert raw(folder, "decode_b_0")["vllm_options"] == '{"seed": 1}'


def test_a_host_without_a_frontend_gets_no_public_models(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "c")
    folder.write(keeps_edits=True)
    assert {path.name for path in folder.repository.iterdir()} == {"decode_c_0", "decode_c_1"}
    assert [raw(folder, f"decode_c_{n}")["threads"] for n in (0, 1)] == ["1", "3"]


def test_one_line_changes_the_checkpoint_of_every_worker_and_tokenizer(tmp_path: Path) -> None:
    for host in ("a", "b", "c"):
        folder_of(tmp_path, host).write(keeps_edits=True)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / "qwen" / "config.json").touch()
    text = THREE_HOSTS.replace("checkpoint: demo", "checkpoint: models/qwen")
    for host in ("a", "b", "c"):
        folder = folder_of(tmp_path, host, text)
        folder.write(keeps_edits=True)
        for path in folder.repository.glob("*/config.pbtxt"):
            checkpoint = raw(folder, path.parent.name).get("checkpoint")
            if path.parent.name == "ensemble":
                assert checkpoint is None
                continue
            assert checkpoint == "../../models/qwen", path
            (found,) = read_configs((TokenizerConfig,), "x", {"checkpoint": checkpoint})
            assert (folder.repository.parent / found.checkpoint / "config.json").exists()


def test_an_edit_wins_until_it_is_rendered_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.write(keeps_edits=True)
    assert folder.differences() == []
    edit(folder, "decode_b_0", '"16"', '"8"')
    (difference,) = folder.differences()
    assert (difference.model, difference.kind) == ("decode_b_0", "edited")
    assert difference.changes == ("slots: 8, in the cluster file 16",)
    assert folder.write(keeps_edits=True) == [] and raw(folder, "decode_b_0")["slots"] == "8"
    assert len(folder.differences()) == 1, "a start does not make it forgotten"
    assert folder.write(keeps_edits=False) == ["decode_b_0"]
    assert raw(folder, "decode_b_0")["slots"] == "16" and folder.differences() == []


def test_a_changed_cluster_file_reaches_what_nobody_edited(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.write(keeps_edits=True)
    edit(folder, "decode_b_0", '"16"', '"8"')
    changed = folder_of(
        tmp_path, "b", THREE_HOSTS.replace("threads: 2", "threads: 4").replace("16", "24")
    )
    assert {d.model: d.kind for d in changed.differences()} == {
        "prefill_b_0": "outdated",
        "decode_b_0": "edited",
    }
    assert changed.write(keeps_edits=True) == ["prefill_b_0"]
    assert raw(changed, "prefill_b_0")["threads"] == "4"
    assert raw(changed, "decode_b_0")["slots"] == "8"


def test_a_worker_that_left_the_file_goes_and_a_copied_folder_stays(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a")
    folder.write(keeps_edits=True)
    (folder.repository / "copied" / "1").mkdir(parents=True)
    (folder.repository / "copied" / "config.pbtxt").write_text('backend: "prefill"\n')
    fewer = folder_of(tmp_path, "a", THREE_HOSTS.replace("a: 3", "a: 2"))
    assert {d.model: d.kind for d in fewer.differences()} == {
        "copied": "added",
        "prefill_a_2": "added",
    }
    fewer.write(keeps_edits=True)
    assert {d.model: d.kind for d in fewer.differences()} == {"copied": "added"}


def test_a_lost_manifest_makes_files_look_edited_and_never_overwritten(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.write(keeps_edits=True)
    manifest = folder.repository.parent / "manifest.json"
    for content in ("", "[]", '{"models": 3}', '{"models": {"../../x": "y"}}'):
        manifest.write_text(content)
        edit(folder, "decode_b_0", "# Rendered", "# rendered")
        assert folder.write(keeps_edits=True) == []
        edit(folder, "decode_b_0", "# rendered", "# Rendered")


def test_a_base_without_workers_is_named(tmp_path: Path) -> None:
    deployment = deployment_in(tmp_path)
    with pytest.raises(TemplateMissing, match="run from the project's root"):
        RenderedFolder(deployment, host_plan(deployment, "a"), tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TemplateMissing, match="no model with backend 'prefill'"):
        RenderedFolder(deployment, host_plan(deployment, "a"), tmp_path / "empty")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30))
def test_whatever_a_value_is_triton_reads_it_as_it_was(value: str) -> None:
    template = (BASE / "prefill_0" / "config.pbtxt").read_text()
    text = with_parameters(template, {"checkpoint": value, "llm_options": value})
    parameters = text_format.Parse(text, ModelConfig()).parameters
    assert parameters["checkpoint"].string_value == parameters["llm_options"].string_value == value


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, [*arguments, "--model-repository", str(BASE)])
    return found.exit_code, found.output


def test_check_shows_hosts_and_edits_and_render_takes_them_back(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(THREE_HOSTS)
    status, said = run("check", "--cluster", str(path))
    assert status == 0 and "is right" in said and "prefill_a_2" in said
    status, said = run("render", "models", "--cluster", str(path), "--host", "b")
    assert status == 0 and "decode_b_0" in said
    edit(folder_of(tmp_path), "decode_b_0", '"16"', '"8"')
    status, said = run("check", "--cluster", str(path))
    assert status == 0 and "decode_b_0: edited by hand" in said and "slots: 8" in said
    run("render", "models", "--cluster", str(path), "--host", "b")
    assert "edited" not in run("check", "--cluster", str(path))[1]


def test_check_ends_with_status_1_and_every_mistake(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(THREE_HOSTS.replace("threads: 2", "threads: two").replace("256M", "much"))
    status, said = run("check", "--cluster", str(path))
    assert status == 1 and "threads: is 'two'" in said and "storage_nodes.b0.dram" in said
    assert run("check", "--cluster", str(tmp_path / "none.yaml"))[0] == 1
    path.write_text(THREE_HOSTS)
    status, said = run("check", "--cluster", str(path), "--host", "d")
    assert status == 2 and "there is no host 'd'" in said
