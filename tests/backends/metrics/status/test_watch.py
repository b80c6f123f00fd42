"""`mooncake status` as a command: it says in one line what is missing, and ends with a status."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from backends.cli import app
from tests.backends.metrics.status.pages import NV, server, text


@contextmanager
def serving(body: str, status: int = 200) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/metrics"
        httpd.shutdown()
        thread.join()


def run(url: str, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["status", "--metrics-url", url, "--interval-s", "0.1", *options]
    )
    return result.exit_code, result.output


def test_one_view_is_printed() -> None:
    with serving(text(server())) as url:
        code, output = run(url, "--once")
    assert code == 0
    assert "prefill_0" in output and url in output


def test_json_is_one_line() -> None:
    with serving(text(server())) as url:
        code, output = run(url, "--json")
    assert code == 0 and output.count("\n") == 1
    seen = json.loads(output)
    assert seen["live"] == 7 and seen["workers"][0]["name"] == "prefill_0"
    assert seen["recent"]["seconds"] >= 0.1


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_a_server_that_is_not_there_is_said_in_one_line_with_what_to_do(option: str) -> None:
    code, output = run("http://127.0.0.1:9/metrics", option)
    assert code == 1
    assert len(output.splitlines()) == 1
    assert "mooncake serve" in output and "--metrics-url" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (NV, 200, "no mooncake metrics"),
        ("<html>hello</html>", 200, "no mooncake metrics"),
        ("mooncake_steps_total{model= 3\n", 200, "http"),
        ("gone", 404, "Not Found"),
    ],
)
def test_whoever_else_answers_is_no_server_of_ours(body: str, status: int, reason: str) -> None:
    with serving(body, status) as url:
        code, output = run(url, "--once")
    assert code == 1 and reason in output and len(output.splitlines()) == 1


def test_an_address_that_is_none_is_refused() -> None:
    code, output = run("nonsense", "--once")
    assert code == 1 and "nonsense" in output


def test_web_becomes_a_gateway_before_that_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words))
    with serving(text(server())) as url:
        _, output = run(url, "--web", "--web-port", "9081", "--frontend", "127.0.0.1:7", "--once")
        assert "http://127.0.0.1:9081/" in output
        address = url.removeprefix("http://").removesuffix("/metrics")
    assert became[0][1:3] == ["-m", "backends.gateway"]
    assert dict(option.split("=", 1) for option in became[0][3:]) == {
        "--name": "status-page",
        "--port": "9081",
        "--frontend": "127.0.0.1:7",
        "--metrics": address,
    }
    code, output = run(url, "--web")
    assert code == 1 and "mooncake serve" in output and len(became) == 1
