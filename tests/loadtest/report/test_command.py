"""`mooncake report` on real files: one run, two runs, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backends.cli import main
from loadtest.report.run_page import write_report
from loadtest.results.recording import read_report
from tests.loadtest.report.runs import answered, full, recording


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    faster = [answered(i, token_times_s=(i + 0.25, i + 0.5)) for i in range(8)]
    runs = {"a.html": full(), "b.html": recording(faster, settings={"speed": 4.0})}
    for name, run in runs.items():
        write_report(run, folder / name)
    return str(folder / "a.html"), str(folder / "b.html")


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_one_run_is_printed_as_it_was_when_it_ended(files, capsys) -> None:
    assert status_of(files[0], "--json") == 0
    *text, line = capsys.readouterr().out.splitlines()
    assert "8 of 12 requests completed" in "\n".join(text)
    assert "goodput" in "\n".join(text)
    found = json.loads(line)
    assert found["name"] == "report" and found["file"] == files[0]
    assert found["numbers"]["answered"] == 8 and found["settings"]["slo_ttft_s"] == 1.0


@pytest.mark.slow
def test_two_runs_are_compared_on_the_terminal_as_a_page_and_as_json(files, capsys) -> None:
    page = Path(files[0]).with_name("ab.html")
    assert status_of(*files, "--out", str(page), "--json") == 0
    *text, line = capsys.readouterr().out.splitlines()
    assert any("TTFT p50" in row and "0.50" in row for row in text)
    assert any("speed" in row and "2.0" in row and "4.0" in row for row in text)
    found = json.loads(line)
    assert found["ratio"]["ttft_p50_s"] == pytest.approx(0.5)
    assert found["difference"]["ttft_p50_s"] == pytest.approx(-0.25)
    html = page.read_text()
    assert "TTFT p50" in html and html.count("<svg") == 5
    assert status_of(str(page)) == 1  # a comparison is no run
    assert "no report of a run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_runs_page_can_be_drawn_anew(files, tmp_path: Path, capsys) -> None:
    assert status_of(files[0], "--out", str(tmp_path / "again.html")) == 0
    assert read_report(tmp_path / "again.html") == full()


def test_a_page_that_is_only_written_leaves_nothing_to_read(files, capsys) -> None:
    before = Path(files[0]).read_bytes()
    assert status_of(files[0], files[0], "--out", files[0]) == 1
    said = capsys.readouterr()
    assert "nothing is left to read; give another file to --out" in said.err
    assert said.out == "" and Path(files[0]).read_bytes() == before


def test_what_is_no_report_is_refused_with_its_path_and_the_reason(files, tmp_path, capsys) -> None:
    (tmp_path / "text.html").write_text("<html>")
    for path, why in (("text.html", "no report of a run"), ("none.html", "No such file")):
        assert status_of(files[0], str(tmp_path / path)) == 1
        said = capsys.readouterr()
        assert f"{path}: {why}" in said.err and said.out == ""
    assert status_of(files[0], "--out", str(tmp_path / "no" / "x.html")) == 1
    assert "x.html: No such file" in capsys.readouterr().err


def test_the_cli_passes_its_arguments_on_and_printing_numbers_draws_nothing(files) -> None:
    code = (
        "import sys; sys.argv = ['mooncake', 'report', *sys.argv[1:]]\n"
        "from backends.cli import main\n"
        "try: main()\n"
        "finally: print('matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, files[0]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "8 of 12 requests completed" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
