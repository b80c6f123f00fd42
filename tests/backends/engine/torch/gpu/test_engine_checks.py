"""The checks for a GPU run on a CPU too, so that they are known to run before there is a GPU."""

from __future__ import annotations

import json

import pytest

from tests.gpu import engine_checks
from tests.gpu.engine_checks import CHECKS, main


@pytest.mark.long
def test_the_checks_of_a_gpu_pass_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["passed"] == [check.__name__ for check in CHECKS] and not found["failed"]
    assert set(found["kernels"]) == {"flashinfer", "torch", "torch, with key starts"}


def test_a_check_that_fails_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(bench: engine_checks.Bench) -> None:
        raise AssertionError("logits are off by 3")

    def right(bench: engine_checks.Bench) -> None:
        assert bench.device.type == "cpu"

    monkeypatch.setattr(engine_checks, "CHECKS", (wrong, right))
    assert main(["--device", "cpu"]) == 1
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["failed"] == {"wrong": "AssertionError: logits are off by 3"}
    assert found["passed"] == ["right"]
