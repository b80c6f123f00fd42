"""The connector's benchmark runs anywhere and leaves no number out."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from bench import connector


@pytest.mark.long
def test_every_promised_number_is_there_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "REQUESTS", 4)
    monkeypatch.setattr(connector, "COPY_ROUNDS", 1)
    measure_copies = connector.measure_copies
    monkeypatch.setattr(connector, "measure_copies", lambda: measure_copies(2**25))
    app = typer.Typer()
    app.command()(connector.main)
    done = CliRunner().invoke(app, ["--repeats", "3"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads(done.output.strip().splitlines()[-1])
    assert len(result["targets"]) in (9, 10)
    assert all(target["value"] is not None or target["why"] for target in result["targets"])
    assert any(row["call"].startswith("match 128k") for row in result["rows"])
