"""`mooncake serve` ends in order whatever interrupts it, also while it says why it cannot."""

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends import cli
from backends.launcher import command, launch
from backends.launcher.environment import EnvironmentProblem


@pytest.mark.parametrize("number", launch.STOP_SIGNALS)
def test_a_signal_while_the_refusal_is_printed_cannot_cut_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    stopped: list[launch.Launcher] = []

    def refuse(launcher: launch.Launcher) -> None:
        raise EnvironmentProblem("slots is 0")

    def print_interrupted(*args: object, **options: object) -> None:
        os.kill(os.getpid(), number)
        print(*args)

    monkeypatch.setattr(launch.Launcher, "start", refuse)
    monkeypatch.setattr(launch.Launcher, "stop", lambda launcher: stopped.append(launcher))
    monkeypatch.setattr(command.console, "print", print_interrupted)

    result = CliRunner().invoke(cli.app, ["serve", "--state-dir", str(tmp_path)])

    assert result.exit_code == 1, result.exception
    assert "slots is 0" in result.output
    assert len(stopped) == 1
