"""Triton's log, turned into what an operator should read."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from backends.launcher.repository import ModelLoad, TritonLog, loads, ready_by_http

LINE = (
    "E1121 02:49:20.655238 8564 model_lifecycle.cc:642] \"failed to load 'prefill_1' version 1: "
    "Internal: TritonModelException: prefill_1/config.pbtxt has 1 mistake(s):\\n  - threads is "
    "'zero'; expected int\\n\\nAt:\\n  /models/model.py(21): initialize\\n\"\n"
)
NEXT = "I1121 02:49:20.655251 8564 model_lifecycle.cc:777] \"failed to load 'prefill_1'\"\n"


REFUSED = ModelLoad(
    "prefill_1", "prefill_1/config.pbtxt has 1 mistake(s):\n  - threads is 'zero'; expected int"
)
LOADED = "I1121 02:49:20.594856 8564 model_lifecycle.cc:839] \"successfully loaded 'prefill_1'\"\n"


def test_a_refusal_is_the_model_s_own_message_without_the_wrapping() -> None:
    assert loads(LINE + NEXT + LOADED) == [REFUSED, ModelLoad("prefill_1")]


def test_a_file_that_triton_alone_cannot_read_is_a_refusal() -> None:
    line = (
        'E1121 02:49:20.655238 8564 model_repository_manager.cc:1460] "Poll failed for model '
        "directory 'mine': Invalid argument: unexpected platform type '' for mine\"\n"
    )
    assert loads(line + NEXT) == [ModelLoad("mine", "unexpected platform type '' for mine")]


def test_each_refusal_is_reported_once_until_the_model_has_loaded(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    watch = TritonLog(log)
    assert watch.news() == []
    log.write_text(LINE[:60])
    assert watch.news() == [], "a line that is still being written waits"
    log.write_text((LINE + NEXT) * 3)
    assert watch.news() == [REFUSED]
    log.write_text((LINE + NEXT) * 3 + LOADED + LINE + NEXT)
    assert watch.news() == [ModelLoad("prefill_1"), REFUSED]


def test_a_log_that_was_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    watch = TritonLog(log)
    log.write_text((LINE + NEXT) * 3)
    assert watch.news() == [REFUSED]
    log.write_text(LOADED)
    assert watch.news() == [ModelLoad("prefill_1")]


def test_a_triton_on_loopback_is_asked_directly_whatever_http_proxy_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as triton:
        host, port = triton.getsockname()
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)

        def answer() -> None:
            connection, _ = triton.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert ready_by_http(f"{host}:{port}", "conductor") is True
        thread.join(10.0)


def test_a_port_that_was_taken_is_noticed_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "decode_0.log"
    watch = TritonLog(log)
    log.write_text(LOADED)
    watch.news()
    assert watch.service_problem == ""
    log.write_text(
        LOADED + 'E1121 02:49:20.65 8564 main.cc:181] "failed to start GRPC service: Unavailable '
        "- Socket '127.0.0.1:11001' already in use \"\n"
    )
    watch.news()
    assert watch.service_problem == (
        "failed to start GRPC service: Unavailable - Socket '127.0.0.1:11001' already in use"
    )


def test_a_worker_s_word_that_triton_has_not_confirmed_is_known(tmp_path: Path) -> None:
    log = tmp_path / "decode_0.log"
    watch = TritonLog(log)
    word = "2026-11-22 12:00:00,000 I backends.workers.worker_process decode_0 (0123456789ab) "
    for text, is_pending in (
        (f"{word}serves on node s0\n", True),
        (f"{word}serves on node s0\n{LOADED}", False),
        (f"{LOADED}{word}serves on node s0\n", True),
    ):
        log.write_text(text)
        watch._log_offset = 0
        watch.news()
        assert watch.is_load_pending is is_pending, text
