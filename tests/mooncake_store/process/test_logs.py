"""Lines of a log for people, or for programs."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from mooncake_store.process.logs import FORMAT_VARIABLE, JsonLines


def record(message: str, *arguments: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.WARNING, "a.py", 1, message, arguments, None)
    made.__dict__.update(more)
    return made


def test_a_line_says_when_who_and_what() -> None:
    made = record("%d of %s", 3, "four")
    made.created, made.msecs = 1_000_000_000.25, 250.0
    line = json.loads(JsonLines().format(made))
    assert line == {
        "time": "2001-09-09T01:46:40.250Z",
        "level": "warning",
        "logger": "a.b",
        "pid": made.process,
        "message": "3 of four",
    }


def test_a_line_about_a_request_names_it_and_its_trace() -> None:
    line = json.loads(JsonLines().format(record("x", request_id="r1", trace_id="t1")))
    assert (line["request_id"], line["trace_id"]) == ("r1", "t1")
    line = json.loads(JsonLines().format(record("x", request_id="r1", trace_id="")))
    assert "trace_id" not in line, "nothing is said of a trace that is not there"


@pytest.mark.parametrize("message", ["two\nlines", 'a "quote"', "\x00\x1b[31m", "ä€\ud800", "{}%"])
def test_whatever_is_said_stays_one_line_of_json(message: str) -> None:
    line = JsonLines().format(record(message))
    assert "\n" not in line and json.loads(line)["message"] == message


def test_an_exception_is_in_the_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    line = JsonLines().format(made)
    assert "\n" not in line and "ValueError: no" in json.loads(line)["exception"]


@pytest.mark.parametrize(("chosen", "is_json"), [("json", True), ("text", False), ("", False)])
def test_the_environment_chooses_for_every_process(chosen: str, is_json: bool) -> None:
    program = (
        "import logging; from mooncake_store.process.logs import start_logging\n"
        "start_logging('%(name)s: %(message)s'); logging.getLogger('it').info('said')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={FORMAT_VARIABLE: chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    if is_json:
        assert json.loads(run.stderr)["message"] == "said"
    else:
        assert run.stderr == "it: said\n"
