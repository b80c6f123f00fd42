"""`mooncake doctor --engine tensorrt_llm`: what differs from what we use is found and named."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.doctor.contract.comparison import Comparison, compare
from backends.doctor.contract.recorded import FILE, contract_of, read
from backends.doctor.contract.sources import Sources, SourcesMissing
from backends.doctor.judgement import BROKEN
from backends.doctor.trtllm_contract import contract_findings, drive
from backends.engine.trtllm.releases import V1, V2
from tests.backends.doctor.contract_sources import write_sources
from tests.backends.engine.trtllm.stand_in import importable

RAW: dict[str, Any] = json.loads(FILE.read_text())


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Sources]]:
    """Of a release with this KV cache manager, exactly as recorded."""

    def write(manager: int) -> Sources:
        with importable("1.4", monkeypatch):
            api_source = importlib.import_module("tensorrt_llm._fake.api_source").api_source
            write_sources(tmp_path / str(manager), read(manager), api_source)
        return Sources(tmp_path / str(manager))

    yield write


def compared(raw: dict[str, Any], there: Sources, manager: int) -> Comparison:
    path = there.file(read(manager).pieces[0].files)
    assert path is not None
    driven = drive(path, manager)
    assert not driven.problem and not driven.error
    return compare(contract_of(raw, manager), there, driven.calls)


@pytest.mark.parametrize("manager", [V1, V2])
def test_sources_as_recorded_do_not_differ(sources: Callable[[int], Sources], manager: int) -> None:
    found = compared(RAW, sources(manager), manager)
    assert found.differences == [] and found.unread == [] and found.checked > 120


def connector(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = raw["groups"][0]["classes"][name]
    return found


def rename_field(raw: dict[str, Any]) -> None:
    connector(raw, "SchedulerOutput")["fields"][0] = "fresh_requests"


def swap_fields(raw: dict[str, Any]) -> None:
    fields = connector(raw, "RequestData")["fields"]
    fields[2], fields[3] = fields[3], fields[2]


def rename_argument(raw: dict[str, Any]) -> None:
    method = connector(raw, "KvCacheConnectorScheduler")["methods"]["update_state_after_alloc"]
    method["arguments"][-1] = "pages"


def miss_method(raw: dict[str, Any]) -> None:
    methods = connector(raw, "KvCacheConnectorWorker")["methods"]
    methods["drop_loads"] = {"arguments": ["self"], "is_abstract": True}


def not_ours(raw: dict[str, Any]) -> None:
    del connector(raw, "KvCacheConnectorWorker")["methods"]["wait_for_save"]


def make_optional(raw: dict[str, Any]) -> None:
    connector(raw, "KvCacheConnectorWorker")["methods"]["get_finished"]["is_abstract"] = False


def change_layout(raw: dict[str, Any]) -> None:
    raw["groups"][1]["classes"]["KvCacheRegion"]["fields"][2] = "pitch"


def rename_class(raw: dict[str, Any]) -> None:
    classes = raw["groups"][3]["classes"]
    classes["KvConnectorConfig"] = classes.pop("KvCacheConnectorConfig")


def miss_option(raw: dict[str, Any]) -> None:
    raw["groups"][3]["classes"]["KvCacheConfig"]["fields"].append("tokens_per_page")


def miss_manager(raw: dict[str, Any]) -> None:
    methods = raw["groups"][2]["classes"]["KVCacheManagerV2"]["methods"]
    methods["get_pages"] = methods.pop("get_page_indices_by_layer_group")


def miss_argument(raw: dict[str, Any]) -> None:
    raw["groups"][4]["classes"]["BaseLLM"]["takes"]["generate_async"].append("salt")


def swap_steps(raw: dict[str, Any]) -> None:
    order = raw["steps"]["2"]["PyExecutor"]["orders"]["_kv_connector_start_batch"]
    order[1], order[2] = order[2], order[1]


def miss_step(raw: dict[str, Any]) -> None:
    raw["steps"]["2"]["KVCacheManagerV2"]["orders"]["free_resources"].append("get_finished")


def swap_calls(raw: dict[str, Any]) -> None:
    calls = raw["calls"]["2"]
    calls[0], calls[1] = calls[1], calls[0]


def miss_call(raw: dict[str, Any]) -> None:
    raw["calls"]["2"].insert(3, "prefetch(1)")


def change_call(raw: dict[str, Any]) -> None:
    calls = raw["calls"]["2"]
    calls[2] = calls[2].replace("at 4", "at 8")  # positions that include what is loaded


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (rename_field, "SchedulerOutput: there is no field fresh_requests; new_requests is like"),
        (swap_fields, "its fields begin with request_id, new_tokens, new_block_ids, computed_"),
        (rename_argument, "(self, request, block_ids) is known as"),
        (miss_method, "there is no method drop_loads"),
        (not_ours, "wait_for_save is abstract, and our class does not have it"),
        (make_optional, "get_finished is abstract"),
        (change_layout, "KvCacheRegion: there is no field pitch"),
        (rename_class, "KvConnectorConfig: there is no such class"),
        (miss_option, "there is no field tokens_per_page; tokens_per_block is like it"),
        (miss_manager, "KVCacheManagerV2: there is no method get_pages"),
        (miss_argument, "generate_async does not take salt"),
        (swap_steps, "_kv_connector_start_batch: after take_scheduled_requests_pending_load"),
        (miss_step, "free_resources: after reset_request_state: nothing, where get_finished"),
        (swap_calls, "driven by its manager: at first: match(1, 4), where nothing is known"),
        (miss_call, "nothing, where prefetch(1) is known"),
        (change_call, "at 4 computes 4), where orders(new 1 pages [7, 3, 9] at 8 computes 4)"),
    ],
)
def test_a_planted_difference_is_found_and_named(
    sources: Callable[[int], Sources], plant: Callable[[dict[str, Any]], None], words: str
) -> None:
    raw = copy.deepcopy(RAW)
    plant(raw)
    found = compared(raw, sources(V2), V2)
    assert 1 <= len(found.differences) <= 2
    assert any(words in str(each) for each in found.differences), found.differences


def test_a_file_that_is_not_there_is_said_not_to_be_compared(
    sources: Callable[[int], Sources],
) -> None:
    there = sources(V1)
    (there.folder / "llmapi" / "llm.py").unlink()
    found = compared(RAW, there, V1)
    assert found.differences == [] and found.unread == ["llmapi/llm.py"]


def test_an_unknown_release_is_refused_with_the_known_ones(
    sources: Callable[[int], Sources],
) -> None:
    folder = sources(V2).folder
    (folder / "version.py").write_text('__version__ = "2.0.0"\n')
    findings = list(contract_findings(folder))
    assert [each.state for each in findings].count(BROKEN) == 1
    assert "1.2 (V1), 1.3 (V1), 1.4 (V2)" in findings[0].what
    assert "190 of 190" not in findings[0].what and "facts are as known" in findings[-1].what


def test_a_manager_that_cannot_be_run_is_a_note_and_the_rest_is_compared(
    sources: Callable[[int], Sources],
) -> None:
    folder = sources(V2).folder
    path = next(folder.rglob("kv_cache_connector.py"))
    path.write_text(path.read_text() + "\nraise OSError('libcuda.so.1')\n")
    findings = list(contract_findings(folder))
    assert "libcuda.so.1" in findings[0].what and findings[0].state == "note"
    assert not [each for each in findings if each.state == BROKEN]


def test_a_manager_that_ends_without_a_word_is_a_note(sources: Callable[[int], Sources]) -> None:
    folder = sources(V2).folder
    path = next(folder.rglob("kv_cache_connector.py"))
    path.write_text(path.read_text() + "\nimport os\nprint('here')\nos._exit(3)\n")
    assert "it ended with status 3" in next(contract_findings(folder)).what


def test_a_manager_that_cannot_be_driven_is_broken(sources: Callable[[int], Sources]) -> None:
    folder = sources(V2).folder
    path = next(folder.rglob("kv_cache_connector.py"))
    path.write_text(path.read_text().replace("def query_num_new", "def ask_num_new"))
    finding = next(contract_findings(folder))
    assert finding.state == BROKEN and "query_num_new_matched_tokens" in finding.what


def test_sources_without_the_connector_s_module_are_broken(
    sources: Callable[[int], Sources],
) -> None:
    folder = sources(V2).folder
    next(folder.rglob("kv_cache_connector.py")).unlink()
    (finding,) = contract_findings(folder)
    assert finding.state == BROKEN and "no kv_cache_connector.py" in finding.what


def test_a_file_that_is_not_python_is_named(sources: Callable[[int], Sources]) -> None:
    folder = sources(V1).folder
    (folder / "sampling_params.py").write_text("class (")
    assert "sampling_params.py cannot be read" in list(contract_findings(folder))[-1].what


def test_a_folder_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SourcesMissing, match="has no folder tensorrt_llm"):
        Sources(tmp_path)
    (finding,) = contract_findings(tmp_path)
    assert finding.state == BROKEN and str(tmp_path) in finding.what
