"""Commands of the systems, the resume folder, the order of cells, the targets, page and picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.headline import environment, measure, systems
from bench.headline.__main__ import chosen_systems
from bench.headline.goodput import IdleTimes, RequestDetail
from bench.headline.measure import CELLS, CONVERSATION, HEAVY, SYNTHETIC, Measurement, run_keys
from bench.headline.page import save_picture, write_headline
from bench.headline.resume import CellKey, MeasuredCell, ResumeFolder
from bench.headline.servers import StartFailed
from bench.headline.summary import headline_targets, round_rows, summary_rows
from bench.headline.systems import KV_BYTES, SYSTEMS, Machine, ServerCommand, plan_of
from bench.headline.traces import TraceRequest
from loadtest.harness.result import Result

IDLE = IdleTimes((100,), (0.3,), (0.02,))
PORTS = (1, 2, 3, 4, 5, 6)
REQUESTS = [TraceRequest(float(n), 100, 3, (n,)) for n in range(4)]


def machine(folder: Path, cores: tuple[int, ...] = (0, 1)) -> Machine:
    return Machine(Path("model"), Path("vllm/bin"), Path("router/bin"), cores, folder)


def commands(system: str, folder: Path, **chosen: object) -> list[ServerCommand]:
    plan = plan_of(system, machine(folder), PORTS, **chosen)  # type: ignore[arg-type]
    return [command for stage in plan.stages for command in stage]


def kv_gib(found: Sequence[ServerCommand]) -> list[float]:
    return [float(one.variables["VLLM_CPU_KVCACHE_SPACE"]) for one in found]


def test_vllm_has_all_cores_all_memory_and_its_defaults(tmp_path: Path) -> None:
    [one] = commands("vllm", tmp_path)
    assert one.words[:3] == ("vllm/bin/vllm", "serve", "model")
    assert "--max-num-batched-tokens" not in one.words
    assert one.words[one.words.index("--served-model-name") + 1] == "model"
    assert one.variables["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert kv_gib([one]) == [2.0]


def test_tuned_vllm_differs_in_one_option(tmp_path: Path) -> None:
    [plain], [tuned] = (
        commands("vllm", tmp_path),
        commands("vllm-tuned", tmp_path, batched_tokens=256),
    )
    assert tuned.words == (*plain.words, "--max-num-batched-tokens", "256")


def test_two_vllm_share_cores_and_memory_behind_the_router(tmp_path: Path) -> None:
    *workers, router = commands("vllm-two", tmp_path, policy="power_of_two")
    assert [one.variables["VLLM_CPU_OMP_THREADS_BIND"] for one in workers] == ["0", "1"]
    assert kv_gib(workers) == [1.0, 1.0]
    words = router.words
    assert words[words.index("--worker-urls") + 1 :][:2] == (systems.url(1), systems.url(2))
    assert words[words.index("--policy") + 1] == "power_of_two"
    assert plan_of("vllm-two", machine(tmp_path), PORTS).base_url == systems.url(3)


def test_vllm_pd_hands_kv_over_by_nixl(tmp_path: Path) -> None:
    prefill, decode, router = commands("vllm-pd", tmp_path)
    for one in (prefill, decode):
        transfer = json.loads(one.words[one.words.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == "NixlConnector"
    channel = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    assert prefill.variables[channel] != decode.variables[channel]
    assert kv_gib([prefill, decode]) == [1.0, 1.0]
    assert "--vllm-pd-disaggregation" in router.words


@pytest.mark.parametrize("system", systems.OURS)
def test_ours_is_served_as_shipped_but_for_its_memory_and_engine(
    tmp_path: Path, system: str
) -> None:
    [one] = commands(system, tmp_path)
    words = one.words
    assert words[words.index("--checkpoint") + 1] == "model"
    nodes = words[words.index("--nodes") + 1].split(",")
    stores = int(words[words.index("--store-bytes") + 1]) * len(nodes)
    here = Machine(tmp_path, Path("bin"), None, (0,), tmp_path)
    systems.mooncake_repository(here, system)
    pages = 0
    roles = systems.OURS[system]
    for role in ("prefill", "decode"):
        assert words[words.index(f"--{role}") + 1] == str(roles.count(role))
    own_lines = ("kv_", "engine") if system == "mooncake-vllm" else ("kv_",)
    for path in (tmp_path / f"{system}-repository").glob("*_[0-9]*/config.pbtxt"):
        role, _, number = path.parent.name.rpartition("_")
        if int(number) >= roles.count(role):
            continue
        shipped = systems.shipped_repository() / path.parent.name / "config.pbtxt"
        changed = set(path.read_text().splitlines()) ^ set(shipped.read_text().splitlines())
        assert all(any(f'"{each}' in line for each in own_lines) for line in changed if line)
        own = next(line for line in path.read_text().splitlines() if 'key: "kv_' in line
                   and "dtype" not in line)  # fmt: skip
        number = int(own.split('string_value: "')[1].split('"')[0])
        assert "kv_bytes" in own
        pages += number
    assert 0.98 * KV_BYTES < stores + pages <= KV_BYTES


def test_service_levels_of_ours_can_be_set(tmp_path: Path) -> None:
    here = Machine(tmp_path, Path("bin"), None, (0,), tmp_path)
    systems.mooncake_repository(here, "mooncake", "2,0.1")
    text = (tmp_path / "mooncake-repository" / "conductor" / "config.pbtxt").read_text()
    assert 'key: "ttft_slo_s" value { string_value: "2.0" }' in text
    assert 'key: "tbt_slo_s" value { string_value: "0.1" }' in text
    with pytest.raises(ValueError, match=r"not enough|could not convert"):
        systems.mooncake_repository(here, "mooncake", "2")


@pytest.mark.parametrize(
    ("cores", "halves"), [((0, 1), ((0,), (1,))), ((4,), ((4,), (4,))), ((0, 1, 2), ((0,), (1, 2)))]
)
def test_halves_cover_all_cores(
    tmp_path: Path, cores: tuple[int, ...], halves: tuple[tuple[int, ...], ...]
) -> None:
    assert machine(tmp_path, cores).halves() == halves


def test_systems_are_chosen_by_letter_or_name() -> None:
    assert chosen_systems("d,vllm") == ["vllm", "mooncake"]
    assert chosen_systems("") == list(SYSTEMS.values())
    with pytest.raises(ValueError, match="no system 'x'; use a or vllm"):
        chosen_systems("x")


def test_requirements_leave_torch_and_extras_out() -> None:
    metadata = (
        "Name: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: torch==2.13.0+cpu\n"
        'Requires-Dist: torchvision; x\nRequires-Dist: numpy\nRequires-Dist: ray; extra == "ray"\n'
    )
    assert environment.requirements(metadata) == ["numpy"]
    assert environment.renamed(metadata).startswith("Name: vllm\nVersion: 0.32.0+cpu\n")


def test_systems_take_turns_and_pd_has_one_round() -> None:
    keys = run_keys(["vllm", "vllm-pd", "mooncake"], 2)
    order = [(key.round, key.system) for key in keys[:: len(CELLS)]]
    assert order == [(1, "vllm"), (1, "vllm-pd"), (1, "mooncake"), (2, "mooncake"), (2, "vllm")]


def test_remaining_time_counts_each_start_once() -> None:
    keys = run_keys(["vllm"], 1)
    cells = sum(10 / (load * 2.0) + measure.CLIENT_S for _, load in CELLS)
    assert measure.remaining_s(keys, 2.0, lambda key: 10, {"vllm": 50.0}) == pytest.approx(
        cells + 50.0
    )


class FakeRun:
    """Replaces servers and client; records what was started and sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Sequence[str] = ()) -> None:
        self.started: list[str] = []
        self.sent = 0
        self.requests: list[int] = []
        self._fails = fails
        monkeypatch.setattr(measure, "running", self.running)
        monkeypatch.setattr(measure, "send", self.send)

    @contextmanager
    def running(self, plan: systems.SystemPlan, logs: Path, progress: object) -> Iterator[float]:
        self.started.append(logs.name)
        if logs.name in self._fails:
            raise StartFailed(f"{logs.name} ended with status 1; its log ends with ...")
        yield 1.0

    def send(
        self,
        bin_: Path,
        model: Path,
        url: str,
        requests: Sequence[TraceRequest],
        folder: Path,
        at_once_max: int | None,
    ) -> object:
        self.sent += 1
        self.requests.append(len(requests))
        return [detail(request.prompt_tokens) for request in requests]


def detail(prompt_tokens: int = 100, ttft_s: float = 0.1) -> RequestDetail:
    return RequestDetail(prompt_tokens, 3, 3, ttft_s, ttft_s + 0.02, (0.01, 0.01))


def measurement(folder: Path) -> Measurement:
    store = ResumeFolder(folder)
    store.write("capacity", {"1.0": 0.95, "1.1": 0.8})
    requests = {CONVERSATION: REQUESTS, SYNTHETIC: REQUESTS}
    found = Measurement(machine(folder), store, requests, 2, lambda line: None)
    if store.read("idle") is None:
        store.write("idle", [vars_of(detail())])
    return found


def vars_of(one: RequestDetail) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


def test_a_rerun_skips_finished_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch)
    measurement(tmp_path).run(["vllm", "mooncake"], 1)
    assert (fake.started, fake.sent) == (["vllm", "mooncake"], 2 * len(CELLS))
    assert fake.requests == [2, 4, 4, 4, 4] * 2  # fewer at the light load
    measurement(tmp_path).run(["vllm", "mooncake"], 1)
    assert fake.sent == 2 * len(CELLS)
    (tmp_path / "cells" / CellKey(1, "mooncake", SYNTHETIC, HEAVY).file).unlink()
    measurement(tmp_path).run(["vllm", "mooncake"], 1)
    assert (fake.started[2:], fake.sent) == (["mooncake"], 2 * len(CELLS) + 1)


def test_a_rerun_does_not_search_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch)
    measurement(tmp_path).run(["vllm-tuned", "vllm-two"], 1)
    searches = sum(map(len, systems.OPTIONS.values()))
    assert fake.sent == searches + 2 * len(CELLS)
    again = measurement(tmp_path)
    again.run(["vllm-tuned", "vllm-two"], 1)
    assert fake.sent == searches + 2 * len(CELLS)
    assert again.chosen("vllm-tuned") == {"batched_tokens": 256}
    assert again.chosen("vllm-two") == {"policy": "cache_aware"}


def test_a_failure_of_pd_is_a_row_and_of_others_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun(monkeypatch, fails=("vllm-pd", "mooncake"))
    run = measurement(tmp_path)
    run.run(["vllm-pd", "mooncake"], 1)
    run.run(["vllm-pd", "mooncake"], 1)
    assert fake.started == ["vllm-pd", "mooncake", "mooncake"]
    rows = summary_rows(run.store.cells(), run.idle)
    assert {row["why"] for row in rows} == {"vllm-pd ended with status 1"}


def test_a_failed_search_leaves_the_first_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRun(monkeypatch, fails=("vllm-tuned",))
    run = measurement(tmp_path)
    run.run(["vllm-tuned", "mooncake"], 1)
    assert run.chosen("vllm-tuned") == {"batched_tokens": 256}
    assert {cell.key.system for cell in run.store.cells()} == {"mooncake"}


def test_other_settings_do_not_continue_a_run(tmp_path: Path) -> None:
    store = ResumeFolder(tmp_path)
    store.check({"seed": 1})
    store.check({"seed": 1})
    with pytest.raises(ValueError, match="other settings"):
        store.check({"seed": 2})


def test_a_cell_survives_its_file(tmp_path: Path) -> None:
    store = ResumeFolder(tmp_path)
    cell = MeasuredCell(
        CellKey(1, "vllm", CONVERSATION, 0.5), 0.4, (detail(),), 60.0, 100.0, 0.1, 2.0
    )
    store.save(cell)
    assert store.has(cell.key)
    assert store.cells() == [cell]


def made_rows(good: Mapping[str, int]) -> list[dict[str, object]]:
    """Rows of a made run of two rounds; `good`: of ten requests, for each system."""
    cells = []
    for number in (1, 2):
        for system, count in good.items():
            details = [detail() for _ in range(count)]
            details += [detail(ttft_s=9.0) for _ in range(10 - count)]
            for trace, load in CELLS:
                kept = tuple(details if load == HEAVY else [detail()] * 10)
                key = CellKey(number, system, trace, load)
                cells.append(MeasuredCell(key, load * 2.0, kept, 60.0, 100.0, 0.1, 2.0))
    return [*summary_rows(cells, IDLE), *round_rows(cells)]  # type: ignore[list-item]


def test_targets_are_the_promised_ratios() -> None:
    rows = made_rows({"vllm": 4, "vllm-tuned": 5, "vllm-two": 6, "mooncake": 9})
    found = {target.name: target for target in headline_targets(rows)}  # type: ignore[arg-type]
    assert len(found) == 12
    for trace in (CONVERSATION, SYNTHETIC):
        for kind in ("fixed", "paper"):
            assert found[f"{kind}_{trace}_1.6_over_vllm"].value == pytest.approx(2.25)
            best = found[f"{kind}_{trace}_1.6_over_best"]
            assert (best.value, best.why) == (pytest.approx(1.5), "over vllm-two")
    assert found["fixed_0.5_of_offered"].value == 1.0
    assert (found["ttft_mean_0.5"].value, found["itl_p99_0.5"].is_met) == (1.0, False)
    goals = {(target.op, target.goal) for target in found.values()}
    assert goals == {(">=", 1.75), (">=", 1.3), (">=", 0.98), ("<=", 1.3), ("<=", 0.5)}


def test_a_peer_without_goodput_counts_as_one_good_request() -> None:
    rows = made_rows({"vllm": 0, "mooncake": 9})
    target = headline_targets(rows)[0]  # type: ignore[arg-type]
    assert (target.value, target.why) == (9.0, "over vllm, counted as one good request")


def test_unmeasured_targets_have_a_reason() -> None:
    found = headline_targets(made_rows({"vllm": 4}))  # type: ignore[arg-type]
    assert all(target.value is None and target.why for target in found)


def test_page_and_picture_show_a_made_result(tmp_path: Path) -> None:
    rows = made_rows({"vllm": 4, "vllm-tuned": 5, "mooncake": 9})
    targets = headline_targets(rows)  # type: ignore[arg-type]
    result = Result("headline", 1.0, rows, targets, {"rounds": 2, "seed": 1})  # type: ignore[arg-type]
    write_headline(tmp_path / "report.html", result)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for shown in ("this project", "vLLM, tuned batch", "2.25", "over vllm-tuned", "<svg"):
        assert shown in text
    for name, begins in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        save_picture(tmp_path / name, rows)  # type: ignore[arg-type]
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_page_without_a_measured_cell_has_no_picture(tmp_path: Path) -> None:
    save_picture(tmp_path / "a.png", [])
    assert not (tmp_path / "a.png").exists()
    write_headline(tmp_path / "report.html", Result("headline", 1.0, [], headline_targets([])))
    assert "not measured" in (tmp_path / "report.html").read_text(encoding="utf-8")
