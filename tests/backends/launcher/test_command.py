"""`mooncake serve` ends in order whatever interrupts it, also while it says why it cannot."""

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends import cli
from backends.launcher import command, launch, launch_plan
from backends.launcher.environment import EnvironmentProblem
from mooncake_store.process.child_processes import STOP_SIGNALS


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_the_refusal_is_printed_cannot_cut_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    stopped: list[launch.Launcher] = []

    def refuse(launcher: launch.Launcher) -> None:
        raise EnvironmentProblem("slots is 0")

    def print_interrupted(*args: object, **options: object) -> None:
        if "cannot serve" in str(args):
            os.kill(os.getpid(), number)
        print(*args)

    monkeypatch.setattr(launch.Launcher, "start", refuse)
    monkeypatch.setattr(launch.Launcher, "stop", lambda launcher: stopped.append(launcher))
    monkeypatch.setattr(command.console, "print", print_interrupted)

    result = CliRunner().invoke(cli.app, ["serve", "--state-dir", str(tmp_path)])

    assert result.exit_code == 1, result.exception
    assert "slots is 0" in result.output
    assert len(stopped) == 1


FLEET = """
name: demo
hosts: {a: {address: 10.77.0.1}}
storage_nodes: {a0: {host: a, dram: 64M}}
pools:
  prefill: {role: prefill, workers: {a: 1}}
  decode: {role: decode, elastic: {}}
keys: {insecure: true}
"""
POD = ("--pool", "decode", "--host", "decode-x7", "--address", "10.77.0.9")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host", "a", "--address", "10.77.0.1"), "with --cluster the file defines this"),
        (("--host", "a", "--engine", "vllm"), "--engine: with --cluster the file defines this"),
        (POD[:4], "give one at which the other hosts reach this host"),
        ((*POD[:5], "fd00::9"), "use an IPv4 address"),
        ((*POD[:3], "", *POD[4:]), "needs a name"),
        ((*POD[:3], "My Host/..", *POD[4:]), "needs a name"),
        ((*POD[:3], "a", *POD[4:]), "is in the cluster file"),
        ((*POD[:3], "a0", *POD[4:]), "is in the cluster file"),
        (("--pool", "prefill", *POD[2:]), "takes one of decode"),
    ],
)
def test_a_host_that_the_cluster_cannot_know_by_this_name_and_address_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FLEET)
    result = CliRunner().invoke(cli.app, ["serve", "--cluster", str(file), *arguments])
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.yaml"], "nothing is rendered"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[launch_plan.ServeOptions]:
    """The options of launches, which are not started."""
    found: list[launch_plan.ServeOptions] = []
    monkeypatch.setattr(command, "serve_until_stopped", lambda options: found.append(options))
    return found


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_engine_is_a_setting_of_every_worker(
    served: list[launch_plan.ServeOptions], engine: str
) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--engine", engine, "--prefill", "3"])
    assert result.exit_code == 0, result.output
    assert served[0].settings.parameters == {"engine": engine}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "sglang"), "Invalid value for '--engine'"),
        (("--engine", "vllm", "--dtype", "float64"), "dtype is 'float64'; use float32 or"),
        (
            ("--engine", "vllm", "--device", "cuda", "--decode", "3"),
            "decode_2: would be made from decode_0, whose engine needs GPUs of its own",
        ),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_before_the_start(
    served: list[launch_plan.ServeOptions], arguments: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert result.exit_code == 2 and not served
    assert said in re.sub(r"[│\s]+", " ", result.output)


def test_the_request_to_try_goes_to_openai_s_interface_where_there_is_one() -> None:
    triton, openai = "http://127.0.0.1:8000", "https://127.0.0.1:9000"
    for openai_url, has_keys, url, key in (
        ("", False, f"{triton}/v2/models/conductor/generate_stream", ""),
        ("", True, f"{triton}/v2/models/conductor/generate_stream", ""),
        (openai, False, f"{openai}/v1/chat/completions", ""),
        (openai, True, f"{openai}/v1/chat/completions", "Authorization: Bearer $KEY"),
    ):
        words = shlex.split(command.first_request(triton, openai_url, has_keys))
        assert words[0] == "curl" and url in words
        assert ([words[words.index("-H") + 1]] if "-H" in words else [""]) == [key]
        assert json.loads(words[words.index("-d") + 1])["stream"] is True
