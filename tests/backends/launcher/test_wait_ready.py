"""Waiting for the start: who is ready, who does not answer, and what was refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.launcher import launch
from backends.launcher.environment import EnvironmentProblem
from backends.launcher.repository import ModelLoad, ModelState

READY, LOADING = [ModelState("decode_0", True)], [ModelState("decode_0", False)]


class FakeTriton:
    """Answers as written, one after the other; the last answer stays."""

    def __init__(self, *answers: list[ModelState] | None, refusal: str = "") -> None:
        self.mirror = SimpleNamespace(models=lambda: {"decode_0"})
        self.child, self._answers, self.asked = None, list(answers), 0
        self._loads = [ModelLoad("decode_0", refusal)] if refusal else []

    def supervise_start(self) -> str:
        return ""

    def take_loads(self) -> list[ModelLoad]:
        return self._loads

    def states(self) -> list[ModelState] | None:
        self.asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[launch.Launcher]:
    made = launch.Launcher(
        launch.ServeOptions(tmp_path, state_dir=tmp_path / "state", ready_s_max=0.0)
    )
    yield made
    made.stop()


def test_every_triton_is_asked_once_a_round(launcher: launch.Launcher) -> None:
    launcher.options = launch.ServeOptions(launcher.repository, ready_s_max=60.0)
    triton = launcher.frontend = FakeTriton(None, LOADING, READY)  # type: ignore[assignment]
    assert launcher.wait_ready() == READY
    assert triton.asked == 3


def test_who_does_not_answer_is_waited_for_by_the_names_of_its_models(
    launcher: launch.Launcher,
) -> None:
    launcher.frontend = FakeTriton(None)  # type: ignore[assignment]
    with pytest.raises(EnvironmentProblem, match="still waiting for decode_0"):
        launcher.wait_ready()


def test_a_refused_model_ends_the_start_when_all_tritons_have_answered(
    launcher: launch.Launcher,
) -> None:
    launcher.options = launch.ServeOptions(launcher.repository, ready_s_max=60.0)
    triton = FakeTriton(None, LOADING, refusal="slots is 0")
    launcher.frontend = triton  # type: ignore[assignment]
    with pytest.raises(EnvironmentProblem, match="decode_0: slots is 0"):
        launcher.wait_ready()
    assert triton.asked == 2, "not before it answered"


def test_refused_models_are_named_when_another_triton_does_not_answer_in_time(
    launcher: launch.Launcher,
) -> None:
    launcher.frontend = FakeTriton(None, refusal="slots is 0")  # type: ignore[assignment]
    with pytest.raises(EnvironmentProblem, match="decode_0: slots is 0"):
        launcher.wait_ready()


def test_an_error_on_a_deployment_s_host_names_a_key_of_the_cluster_file(
    launcher: launch.Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    launcher.log_dir = tmp_path / "file" / "logs"
    monkeypatch.setattr(launch.environment, "find_triton", lambda: None)
    monkeypatch.setattr(launch, "remove_leftovers", list)
    monkeypatch.setattr(launch, "end_orphans", lambda _: None)
    monkeypatch.setattr(launcher, "_check", lambda _: None)
    single = launcher.plan
    for deployment, named in (("", "with --state-dir"), ("d", "state_dir in the cluster file")):
        launcher.plan = replace(single, deployment=deployment)
        with pytest.raises(EnvironmentProblem, match=named):
            launcher.start()
    launcher.plan = single
