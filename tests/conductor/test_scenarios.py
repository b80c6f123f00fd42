"""Runs the scenarios in scenarios/*.txt: commands, a line of dashes, what is expected.

`pytest tests/conductor --rewrite` writes what really happens; the diff is the review. A scenario's
first line says what it proves; the commands are the methods of `Play`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_store.native import library
from tests.conductor.play import Play

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.fixture(params=["compiled", "numpy"])
def decided_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "numpy":
        monkeypatch.setenv(library.SWITCH, "off")
        library.forget()
    elif library.library() is None:
        pytest.skip(library.why_not())
    yield
    monkeypatch.undo()
    library.forget()


@pytest.mark.usefixtures("decided_by")
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_ends_as_written(path: Path, request: pytest.FixtureRequest) -> None:
    play, text, found = Play(), path.read_text(), []
    assert text.startswith("# "), "the first line says what is proved"
    for paragraph in text.strip().split("\n\n"):
        commands = paragraph.split("\n----")[0].split("\n")
        happened = [
            said for line in commands if not line.startswith("#") for said in play.run(line)
        ]
        found.append("\n".join([*commands, *(["----", *happened] if happened else [])]))
    rewritten = "\n\n".join(found) + "\n"
    if request.config.getoption("--rewrite", default=False):
        path.write_text(rewritten)
    assert rewritten == path.read_text()
