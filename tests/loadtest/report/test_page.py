"""A run's page: what it holds, and that it is the run's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.recording import RecordingError
from loadtest.report.page import read_report, write_report
from tests.loadtest.test_recording import recording


def test_the_page_is_the_runs_file(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    write_report(recording(), path)
    assert read_report(path) == recording()


def test_a_file_that_is_no_report_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    with pytest.raises(RecordingError, match=r"run\.html: No such file"):
        read_report(path)
    path.write_text("<html></html>")
    with pytest.raises(RecordingError, match=r"run\.html: no report of a run"):
        read_report(path)
    path.write_text('<script type="application/x-mooncake-recording">AAAA</script>')
    with pytest.raises(RecordingError, match=r"run\.html: not a recording"):
        read_report(path)
