"""Changing the model repository while it serves: copy, edit, break, remove. Nothing is lost."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.config_command import run_config
from tests.e2e.load import B, Load, ask, assert_all_answered
from tests.e2e.server import Server, running, wait_until
from tests.e2e.server_processes import processes_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    yield from running(tmp_path_factory.mktemp("edits"), state_dir, {})


def test_a_copied_worker_folder_serves(server: Server) -> None:
    started_s = time.monotonic()
    shutil.copytree(server.repository / "prefill_0", server.repository / "prefill_2")

    def is_served_by_it() -> bool:
        answer = ask(server, 1, prefill_worker="prefill_2")
        return not answer.error and answer.decision["prefill"] == "prefill_2"

    wait_until(is_served_by_it, "prefill_2 to answer", 60.0)
    print(f"prefill_2 answered after {time.monotonic() - started_s:.1f} s")


@pytest.mark.long
def test_an_edit_under_load_loses_no_request_and_no_cached_block(server: Server) -> None:
    assert not ask(server, 2).error
    with Load(server) as load:
        load.wait_for_more(5)
        server.edit("prefill_0", "chunk_tokens", "256")
        server.edit("decode_1", "slots", "16")
        server.edit("conductor", "ttft_slo_s", "29")
        for model in ("prefill_0", "decode_1", "conductor"):
            wait_until(
                lambda m=model: server.triton_log().count(f"successfully loaded '{m}'") >= 2,
                f"{model} to be reloaded",
                40.0,
            )
        load.wait_for_more(15)
    assert_all_answered(load)
    assert ask(server, 2).cached_tokens == 4 * B, "KV outlives the workers that computed it"
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_a_wrong_edit_keeps_the_old_settings_and_names_every_mistake(server: Server) -> None:
    for name, value in (("chunk_tokens", "100"), ("threads", "zero"), ("dtype", "int3")):
        server.edit("prefill_1", name, value)
    path = server.repository / "prefill_1" / "config.pbtxt"
    path.write_text(path.read_text().replace('key: "lease_s"', 'key: "leese_s"'))

    def said() -> str:
        text = server.log.read_text(errors="replace")
        return text if "prefill_1/config.pbtxt has" in text else ""

    text = " ".join(wait_until(said, "the launcher to say what is wrong", 40.0).split())
    for part in (
        "4 mistake(s)",
        "unknown parameter 'leese_s'",
        "threads is 'zero'",
        "dtype is 'int3'",
        "chunk_tokens (100)",
        "kept the old settings",
    ):
        assert part in text, (part, text)
    answer = ask(server, 3, prefill_worker="prefill_1")
    assert not answer.error and len(answer.output_ids) == 8
    for name, value in (("chunk_tokens", "128"), ("threads", "1"), ("dtype", "float32")):
        server.edit("prefill_1", name, value)
    path.write_text(path.read_text().replace('key: "leese_s"', 'key: "lease_s"'))
    wait_until(
        lambda: "prefill_1 serves with the settings" in server.log.read_text(errors="replace"),
        "the mended settings to be taken",
        40.0,
    )
    assert server.log.read_text(errors="replace").count("4 mistake(s)") == 1


def test_an_edit_that_triton_cannot_read_is_named_and_one_from_the_future_is_taken(
    server: Server,
) -> None:
    path = server.repository / "prefill_1" / "config.pbtxt"
    good = path.read_bytes()
    loads = server.log.read_text(errors="replace").count("prefill_1 serves with the settings")
    for raw, part in (
        (good + b"parameterz { }\n", 'has no field named "parameterz"'),
        (b"\xef\xbb\xbf" + good, "byte order mark"),
        (b"", "prefill_1/config.pbtxt is empty"),
    ):
        path.write_bytes(raw)
        wait_until(
            lambda p=part: p in " ".join(server.log.read_text(errors="replace").split()),
            f"the launcher to report {part!r}",
            5.0,
        )
    assert not ask(server, 4, prefill_worker="prefill_1").error
    path.write_bytes(good)
    server.edit("prefill_1", "chunk_tokens", "64")
    os.utime(path, (4_000_000_000.0, 4_000_000_000.0))
    wait_until(
        lambda: (
            server.log.read_text(errors="replace").count("prefill_1 serves with the settings")
            > loads
        ),
        "an edit of the future to be taken",
        40.0,
    )


def test_a_set_takes_effect_on_the_running_server_and_says_so(server: Server) -> None:
    path = server.repository / "conductor" / "config.pbtxt"
    before = path.read_text()
    assignment = "conductor.output_tokens_default=5"
    status, said = run_config(server, "set", assignment, "conductor.admission=early")
    assert status == 0, said
    assert "conductor.output_tokens_default: '256' -> '5'" in said
    assert "conductor serves with it" in said
    answer = server.ask(text_input="It was", end_id=-1, return_decision=True)
    assert not answer.error and len(answer.output_ids) == 5
    assert answer.decision["admission"] == "early"
    changed = [line for line in path.read_text().splitlines() if line not in before.splitlines()]
    assert len(changed) == 2, "comments and layout stay"
    assert run_config(server, "set", assignment)[1] == (
        "all parameters have these values already: nothing was changed"
    )


def test_a_set_that_only_the_running_server_can_refuse_is_taken_back(server: Server) -> None:
    path = server.repository / "conductor" / "config.pbtxt"
    before = path.read_bytes()
    status, said = run_config(server, "set", "conductor.recording_folder=/dev/null/traces")
    assert status == 1 and path.read_bytes() == before
    assert "conductor refused it" in said and "the old settings stay in use" in said, said
    assert not server.ask(text_input="It was", max_tokens=3).error


def test_removing_a_worker_s_folder_drains_it(server: Server) -> None:
    stream = server.stream(
        text_input="It was",
        max_tokens=600,
        end_id=-1,
        stream=True,
        parameters={"decode_worker": "decode_1"},
    )
    assert stream.next() is not None
    shutil.rmtree(server.repository / "decode_1")
    answer = stream.all()
    assert not answer.error and len(answer.output_ids) == 599, "a running stream ends normally"
    # Its folder is gone at once; it serves until its Triton has seen that.
    worker = "/decode_1/1/model.py"
    wait_until(lambda: not processes_of(server, worker), "decode_1's process to end")
    answers = [ask(server, number) for number in range(50, 56)]
    assert not any(answer.error for answer in answers)
    assert {answer.decision["decode"] for answer in answers} == {"decode_0"}
    wait_until(server.is_idle, "pages, slots and leases to be free")
