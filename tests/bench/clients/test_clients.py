"""Installing, running and reading public clients, without any of them and without a server."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import typer
from huggingface_hub import snapshot_download  # as aiperf looks a tokenizer up
from rich.console import Console
from typer.testing import CliRunner

from bench.clients import __main__ as clients
from bench.clients import aiperf, genai_perf, libraries
from bench.clients.__main__ import chosen_clients
from bench.clients.agreement import Agreement, ClientLoad, ClientReport, EventSum, risen, totals
from bench.clients.call_matrix import VARIABLE, BackOff, CalledServer, raised, run_calls
from bench.clients.environment import ClientFailed, environment, npm_environment, run_client
from bench.clients.keyed_gateway import PublicServer, keyed_gateway
from bench.clients.replay import ScaledTrace, tables_of
from loadtest.client.server import addresses_of
from loadtest.harness.benchmark import BenchmarkRun
from loadtest.harness.server import PROJECT
from loadtest.replay.prompts import TokenSource, plan
from loadtest.replay.trace import TRACE_BLOCK_TOKENS, read_trace

TRACE = Path(__file__).resolve().parents[2] / "data" / "conversation_turns.jsonl"
LOAD = ClientLoad(addresses_of("127.0.0.1:8001"), Path("tokenizer"), 40, 2, 512, 32)
CALLED = CalledServer("http://127.0.0.1:9000/v1", "demo")


PAGE = """# TYPE mooncake_ttft_seconds histogram
mooncake_ttft_seconds_count{model="conductor"} 40
mooncake_ttft_seconds_sum{model="conductor"} 4.0
mooncake_ttft_seconds_bucket{model="conductor",le="0.1"} 20
nv_inference_request_success{model="preprocessing",version="1"} 10
nv_inference_request_duration_us{model="preprocessing",version="1"} 50000
nv_inference_request_success{model="postprocessing",version="1"} 100
nv_inference_request_duration_us{model="postprocessing",version="1"} 100000
"""
NOTHING = totals("")
SERVED = NOTHING | {"conductor": EventSum(40, 4.0)}  # 100 ms each


def report(mean_ms: float, requests: int = 40, model: str = "conductor") -> ClientReport:
    return ClientReport("aiperf", model, "synthetic", requests, mean_ms, mean_ms, "")


def test_a_client_agrees_within_15_percent_of_the_servers_mean() -> None:
    for mean_ms, met in ((114.9, True), (86.0, True), (116.0, False), (84.0, False)):
        assert Agreement(report(mean_ms), SERVED).target().is_met is met


def test_the_ensembles_other_models_count_only_for_its_own_requests() -> None:
    found = totals(PAGE)

    def server_ms(counted: Mapping[str, EventSum], model: str) -> float | None:
        return Agreement(report(100.0, model=model), counted).server_ttft_ms

    assert server_ms(found, "conductor") == pytest.approx(100.0)
    assert server_ms(found, "ensemble") == pytest.approx(100.0 + 5.0 + 1.0)
    assert server_ms(risen(found, found), "conductor") is None
    assert server_ms(SERVED, "ensemble") is None, "nobody preprocessed: no guess"


def test_runs_that_did_not_serve_the_same_requests_are_not_compared() -> None:
    found = Agreement(report(100.0), NOTHING | {"conductor": EventSum(41, 4.1)})
    assert found.ratio is None and found.row()["client_over_server"] is None
    assert found.target().is_met is None and "41 requests" in found.target().why


def test_a_server_that_counted_nothing_is_not_agreed_with() -> None:
    for served, model in ((NOTHING, "conductor"), (SERVED, "ensemble")):
        found = Agreement(report(100.0, model=model), served)
        assert found.row()["server_ttft_ms_mean"] is None and found.target().is_met is None


@pytest.mark.parametrize("length_scale", [1.0, 0.25, 0.02])
def test_a_scaled_trace_has_the_lengths_and_times_of_our_own_replay(
    tmp_path: Path, length_scale: float
) -> None:
    rows = read_trace(TRACE)
    path = tmp_path / "scaled.jsonl"
    block_tokens = ScaledTrace(TRACE, length_scale, 100.0).write(path)
    assert block_tokens == round(TRACE_BLOCK_TOKENS * length_scale)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    planned = plan(rows, TokenSource(2_048), length_scale, 100.0)
    assert [line["input_length"] for line in lines] == [len(each.prompt_ids) for each in planned]
    assert [line["output_length"] for line in lines] == [each.output_tokens for each in planned]
    for line, each, row in zip(lines, planned, rows, strict=True):
        assert line["timestamp"] == pytest.approx(each.due_s * 1_000.0, abs=0.51)
        blocks = len(line["hash_ids"])
        assert tuple(line["hash_ids"]) == row.hash_ids
        assert (blocks - 1) * block_tokens < line["input_length"] <= blocks * block_tokens


@pytest.mark.long
def test_an_environment_is_made_once_and_anew_when_something_else_is_wanted(tmp_path: Path) -> None:
    made = environment("client", ("pip",), tmp_path)
    assert made.install_s > 0 and (made.bin / "pip").exists()
    assert environment("client", ("pip",), tmp_path).install_s == 0
    with pytest.raises(ClientFailed, match=r"cannot install pip ./no-such-package; it needs a"):
        environment("client", ("pip", "./no-such-package"), tmp_path)
    assert not (made.folder / "installed.txt").exists(), "half an installation is none"


def test_a_client_that_fails_shows_the_end_of_what_it_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('first'); raise SystemExit('it was the port')"]
    with pytest.raises(ClientFailed, match=r"(?s)ended with status 1; .*it was the port"):
        run_client(command, tmp_path)


def test_a_client_that_hangs_is_ended_with_the_processes_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); "
        "print(child.pid, flush=True); child.wait()"
    )
    with pytest.raises(ClientFailed, match="ran over 6 s"):
        run_client([sys.executable, "-c", program], tmp_path, run_s_max=6.0)
    child = int((tmp_path / "output.txt").read_text())
    with pytest.raises(ProcessLookupError):
        wait_for_end(child)


def wait_for_end(process_id: int) -> None:
    """Ends by ProcessLookupError, or with the deadline of the test."""
    while True:
        os.kill(process_id, 0)
        status = Path(f"/proc/{process_id}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError


def test_aiperf_is_given_the_model_the_stream_and_the_template(tmp_path: Path) -> None:
    asked = aiperf.arguments(LOAD, "ensemble", tmp_path, None)
    assert asked[asked.index("--custom-endpoint") + 1] == "/v2/models/ensemble/generate_stream"
    assert f"payload_template:{tmp_path / 'template.jinja'}" in asked
    assert asked[asked.index("--url") + 1] == "http://127.0.0.1:8000" and "--isl" in asked
    replaying = aiperf.arguments(LOAD, "conductor", tmp_path, tmp_path / "trace.jsonl")
    assert "--fixed-schedule" in replaying and "--isl" not in replaying


def test_aiperf_asks_the_gateway_by_its_endpoint_for_chats(tmp_path: Path) -> None:
    load = dataclasses.replace(LOAD, gateway=CALLED)
    asked = aiperf.chat_arguments(load, tmp_path, counts_by_server=False)
    assert asked[asked.index("--endpoint-type") + 1] == "chat" and "--streaming" in asked
    assert asked[asked.index("--url") + 1] == "http://127.0.0.1:9000"
    assert asked[asked.index("--model") + 1] == "demo" and "--use-server-token-count" not in asked
    counted = aiperf.chat_arguments(load, tmp_path, counts_by_server=True)
    assert {"--use-server-token-count", "--per-chunk-usage"} <= set(counted)


def test_the_calls_of_a_library_are_read_from_between_its_own_words() -> None:
    said = [
        "Give Feedback / Get Help",
        json.dumps({"client": "litellm 1"}),
        json.dumps({"call": "chat", "came": "hi", "failure": "", "left_out": ""}),
        json.dumps({"call": "keys", "came": "", "failure": "", "left_out": "no keys"}),
        json.dumps({"call": "n", "came": "", "failure": "Traceback", "left_out": ""}),
    ]
    found = libraries.read_run("\n".join(said))
    counts = {"calls": 2, "failed": 1, "left_out": 1}
    assert found.row() == {"client": "litellm 1", **counts, "gates": True}
    assert found.target().is_met is False and found.target().why == "n"
    with pytest.raises(ClientFailed, match="made no call; its output: Segmentation"):
        libraries.read_run("Segmentation fault")


def test_a_call_that_fails_keeps_no_other_from_being_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(server: CalledServer) -> str:
        raise ValueError(server.model)

    def about_keys(server: CalledServer) -> str:
        return server.single_key

    monkeypatch.setenv(VARIABLE, json.dumps(dataclasses.asdict(CALLED)))
    run_calls("a client 1", [fails, lambda server: server.url], [about_keys])
    found = libraries.read_run(capsys.readouterr().out)
    failed, came, left_out = found.outcomes
    assert failed.call == "fails" and "ValueError: demo" in failed.failure
    assert came.came == CALLED.url and left_out.left_out and not left_out.came
    with_keys = dataclasses.replace(CALLED, single_key="k", metered_key="m")
    monkeypatch.setenv(VARIABLE, json.dumps(dataclasses.asdict(with_keys)))
    run_calls("a client 1", [], [about_keys])
    assert libraries.read_run(capsys.readouterr().out).outcomes[0].came == "k"


def test_what_a_call_raises_has_to_be_of_exactly_its_class() -> None:
    assert str(raised(KeyError, lambda: {}["a"])) == "'a'"
    with pytest.raises(AssertionError, match="KeyError, not LookupError"):
        raised(LookupError, lambda: {}["a"])
    with pytest.raises(AssertionError, match="no KeyError, but 5"):
        raised(KeyError, lambda: 5)


def test_a_client_that_comes_back_too_soon_is_found_out() -> None:
    response = types.SimpleNamespace(status_code=429, headers={"retry-after": "1"})
    noted = BackOff(io.StringIO())
    noted.answered(response)
    noted.sent(None)
    noted.answered(types.SimpleNamespace(status_code=200, headers={}))
    with pytest.raises(AssertionError):
        noted.check()
    noted.waited_s = [(1.0, 1.01)]
    assert noted.check() == "[429, 200]; told 1 s, waited 1.01 s"


def test_clients_of_the_gateway_are_left_out_of_a_server_without_one() -> None:
    every = chosen_clients(None, None, None)
    assert "openai-2" in every and every == chosen_clients(None, "h:1", "http://h:9")
    assert chosen_clients(None, "h:1", None) == ["aiperf", "genai-perf", "tritonclient", "curl"]
    with pytest.raises(typer.BadParameter, match="litellm want --openai-url"):
        chosen_clients(["litellm"], "h:1", None)
    with pytest.raises(typer.BadParameter, match="give --url too"):
        chosen_clients(None, None, "http://h:9")
    with pytest.raises(typer.BadParameter, match="no such client: wget"):
        chosen_clients(["wget"], None, None)


def test_a_client_that_is_only_reported_runs_when_it_is_named() -> None:
    reported = [name for name, agent in libraries.AGENTS.items() if not agent.gates]
    every = chosen_clients(None, None, None)
    assert set(libraries.AGENTS) - set(reported) <= set(every) and not set(reported) & set(every)
    assert chosen_clients(reported, None, None) == reported


@pytest.mark.parametrize(("gates", "status"), [(True, 1), (False, 0)])
def test_a_failed_call_of_a_client_that_gates_is_the_exit_status(
    gates: bool, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = libraries.CallOutcome("chat", "", "Traceback", "")
    made = libraries.LibraryRun("an agent 1", (outcome,), gates)
    agent = dataclasses.replace(libraries.AGENTS["instructor"], gates=gates)

    @contextlib.contextmanager
    def served(*_: object) -> Iterator[PublicServer]:
        yield PublicServer(LOAD.addresses, CALLED)

    monkeypatch.setattr(clients, "AGENTS", {"instructor": agent})
    monkeypatch.setattr(clients, "installed", lambda *_: {"instructor": tmp_path})
    monkeypatch.setattr(clients, "public_server", served)
    monkeypatch.setattr(clients.libraries, "run", lambda *_: made)
    app = typer.Typer()
    app.command()(clients.main)
    found = CliRunner().invoke(app, ["instructor", "--out", str(tmp_path / "out")])
    assert found.exit_code == status
    [row] = json.loads(found.output.splitlines()[-1])["rows"]
    assert (row["failed"], row["gates"]) == (1, gates)


def test_a_script_that_does_not_end_is_a_failed_call_of_its_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ended(*_: object) -> libraries.LibraryRun:
        raise ClientFailed("ended with status 13")

    monkeypatch.setattr(clients.libraries, "run", ended)
    measured, server = BenchmarkRun(), PublicServer(LOAD.addresses, CALLED)
    agent = libraries.AGENTS["npm-ai"]
    clients.call_all(
        [agent], {agent.name: tmp_path}, server, tmp_path, measured, Console(quiet=True)
    )
    assert measured.rows[0]["failed"] == 1 and measured.targets[0].is_met is False


@pytest.mark.parametrize("name", libraries.AGENTS)
def test_the_script_of_an_agent_is_there(name: str) -> None:
    agent = libraries.AGENTS[name]
    path = (
        libraries.AGENTS_FOLDER / agent.calls
        if agent.is_npm
        else PROJECT / f"{agent.calls.replace('.', '/')}.py"
    )
    assert path.is_file()


def test_a_npm_environment_without_npm_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ClientFailed, match="apt-get install -y nodejs npm"):
        npm_environment("npm-ai", ["ai@6.0.326"], tmp_path)
    (tmp_path / "npm-ai").mkdir()
    (tmp_path / "npm-ai" / "installed.txt").write_text("ai@6.0.326")
    assert npm_environment("npm-ai", ["ai@6.0.326"], tmp_path).install_s == 0.0


def test_the_server_of_a_checkpoint_is_called_by_the_name_of_its_folder(tmp_path: Path) -> None:
    own = keyed_gateway(tmp_path, "smollm2-135m")
    assert own.called.model == "smollm2-135m" and "--checkpoint" in own.arguments
    assert own.called.checkpoint == str(PROJECT / ".mooncake/checkpoints/smollm2-135m")
    demo = keyed_gateway(tmp_path)
    assert demo.called.model == "demo" and "--checkpoint" not in demo.arguments


def test_a_tokenizer_folder_is_found_by_its_name_in_the_cache(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    variables = aiperf.lay_out_cache(tokenizer, tmp_path / "home")
    cache = Path(variables["HF_HOME"]) / "hub"
    found = Path(snapshot_download(aiperf.CACHED_TOKENIZER, cache_dir=cache, local_files_only=True))
    assert found.resolve() == tokenizer.resolve() and (found / "tokenizer.json").exists()


def test_aiperfs_own_figures_and_table_are_read(tmp_path: Path) -> None:
    found = {
        "time_to_first_token": {"unit": "ms", "avg": 98.6, "p50": 96.5},
        "request_count": {"unit": "requests", "avg": 40.0},
        "error_summary": [],
    }
    (tmp_path / aiperf.EXPORT).write_text(json.dumps(found))
    console = (
        "  NVIDIA AIPerf | LLM Metrics: Effective  \n┏━┓\n  NVIDIA AIPerf | LLM Metrics   \n"
        "│ Time to First Token (ms) │\n\n╭─── GPU Telemetry ───╮\n"
    )
    (tmp_path / aiperf.CONSOLE).write_text(console)
    read = aiperf.read_report(tmp_path, "conductor", "synthetic")
    assert (read.requests, read.ttft_ms_mean, read.ttft_ms_p50) == (40, 98.6, 96.5)
    assert read.table == "NVIDIA AIPerf | LLM Metrics\n│ Time to First Token (ms) │"
    found["error_summary"] = [{"error_details": {"code": 400}, "count": 3}]
    (tmp_path / aiperf.EXPORT).write_text(json.dumps(found))
    with pytest.raises(ClientFailed, match=r'aiperf had errors.*"code": 400'):
        aiperf.read_report(tmp_path, "conductor", "synthetic")


def test_genai_perfs_own_figures_and_table_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "ensemble-triton-vllm-concurrency2"
    folder.mkdir()
    found = {"time_to_first_token": {"avg": 97.4, "p50": 95.0}, "request_count": {"avg": 40.0}}
    (folder / "profile_export_genai_perf.json").write_text(json.dumps(found))
    said = f"[10:00:00] INFO Loading\n   {genai_perf.TABLE_TITLE}   \n│ TTFT │\n[10:00:01] INFO x\n"
    read = genai_perf.read_report(tmp_path, "ensemble", "vllm", said)
    assert (read.requests, read.ttft_ms_mean) == (40, 97.4)
    assert read.table == f"{genai_perf.TABLE_TITLE}\n│ TTFT │"
    with pytest.raises(ClientFailed, match="wrote 0 reports"):
        genai_perf.read_report(folder, "ensemble", "vllm", said)


def test_the_tables_of_a_replay_are_read_without_its_progress() -> None:
    said = ["replay ━━━ 31/32", "replay ━━━ 32/32", "   32 of 32 requests completed  ", "┏━┓"]
    assert tables_of(said) == "   32 of 32 requests completed\n┏━┓"


def test_a_perf_analyzer_that_does_not_start_says_which_libraries_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ClientFailed, match="does not start"):
        genai_perf.lend_libraries(tmp_path / "bin")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "perf_analyzer"
    program.write_text("#!/bin/sh\necho 'libb64.so.0d: cannot open' >&2\nexit 127\n")
    program.chmod(0o755)
    with pytest.raises(ClientFailed, match=r"(?s)libb64.so.0d: cannot open.*apt-get install"):
        genai_perf.lend_libraries(tmp_path / "bin")
