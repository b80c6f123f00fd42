"""The blocks of README and quick start do what they say, typed into a shell one after the other.

They run in a copy of the checkout, with ports of their own and smaller sizes: what stands between
the page and the programs is said in `Typist`. A block whose last command serves is a server for the
blocks below it in its section, until another one or the section's end.

Not here: blocks marked as not run, and options of all others (test_commands_in_docs.py).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from backends.launcher.environment import free_ports
from tests.documented_blocks import COMMENT, RUN_PAGES, Block, blocks_of
from tests.e2e.server import wait_until
from tests.test_links import tree

ROOT = Path(__file__).resolve().parents[2]
PORTS = ("9000", "8000", "8001", "8002")  # as the pages say them: OpenAI's, HTTP, gRPC, metrics
NOT_COPIED = ("docs/", "tests/", "deploy/")
READY_S_MAX, COMMAND_S_MAX, STOP_S_MAX = 240.0, 120.0, 60.0
# A command -> what shows that it did its work, beside its exit status.
SAYS = {
    "/v1/chat/completions": r"data: \[DONE\]",
    "/v1/models": r'"id":"demo"',
    "/generate_stream": r'"finish_reason":"(length|stop)"',
    "/ensemble/generate": r'"finish_reason":"(length|stop)"',
    "ask; sleep 1; ask": r'(?s)"cached_tokens":0\b.*"cached_tokens":[1-9]\d{2}',
    "mooncake doctor": r"ok +(request: first token after|start: nothing prevents it)",
    "mooncake status": r"prefill, \d live",
    "mooncake config diff": r"conductor\.policy = ",
    "mooncake config set": r"conductor serves with it",
    "make loadtest": r"report: .*loadtest\.html",
    "mooncake cluster check": r"cluster\.yaml is right",
    "mooncake tenants add": r"(?m)\bmk-\w+",
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
BLOCKS = [block for page in RUN_PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.kind == "sh" and not block.not_run]


def server_of(block: Block) -> Block | None:
    """The last one above it in its section."""
    above = [
        each
        for each in RUN
        if each.is_server
        and each.page == block.page
        and each.section == block.section
        and each.line < block.line
    ]
    return above[-1] if above else None


@dataclass(slots=True)
class RunningBlock:
    """A server that a block has started, as it runs in somebody's terminal."""

    text: str
    process: subprocess.Popen[bytes]
    log: Path

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"it ended:\n{self.log.read_text()}"
        return "ready after" in self.log.read_text()

    def stop(self) -> None:
        """Ctrl-C reaches all processes of a terminal."""
        if self.process.poll() is not None:
            return
        processes = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGINT)
        # make itself ends by the signal, when what it runs has ended.
        assert self.process.wait(STOP_S_MAX) in (0, -signal.SIGINT), self.log.read_text()
        assert not psutil.wait_procs(processes, STOP_S_MAX)[1]


def lines_of(text: str) -> list[str]:
    """Without comments, each as long as its command."""
    return [f"{line}\n" for line in COMMENT.sub("", text).replace("\\\n", " ").splitlines()]


class Typist:
    """Somebody with a checkout and a shell, who reads a page from its beginning.

    The programs that the pages call are stood in for by scripts that add options and call the real
    ones: ports and sizes for `mooncake`, `--fail-with-body` for `curl`, a shorter run and limits
    that a busy machine meets for the load test.
    """

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        files = [name for name in tree() if (ROOT / name).is_file()]
        for name in files:
            if not name.startswith(NOT_COPIED):
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.checkout / name, follow_symlinks=False)
        self.link = "backends/model_repository"
        if not (self.checkout / self.link).exists():
            (self.checkout / self.link).symlink_to((ROOT / self.link).readlink())
        ports = free_ports(len(PORTS), (), 20_000, 32_000)
        self.ports = {said: str(port) for said, port in zip(PORTS, ports, strict=True)}
        self.programs = folder / "programs"
        self._lay_programs()
        self.server: RunningBlock | None = None
        self.typed: set[str] = set()  # lines, since this server runs
        (folder / "home").mkdir()
        self.env = os.environ | {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "MODEL": "demo",  # `make serve` would fetch its default model
        }
        for name in ("COLUMNS", "PYTHONPATH", "MAKEFLAGS"):
            self.env.pop(name, None)

    def _lay_programs(self) -> None:
        _, http, grpc, metrics = self.ports.values()
        page = f"--metrics-url http://127.0.0.1:{metrics}/metrics"
        listen = f"--http-port {http} --grpc-port {grpc} --metrics-port {metrics}"
        small = "--seconds 8 --users 2 --workload chat --slo-ttft-p90 60 --slo-tbt-p90 60"
        python = f"""case "$2" in
            loadtest.users) set -- "$@" --unloaded-requests 2 --url 127.0.0.1:{grpc} {small};;
            backends.cli) case "$3" in
                serve) set -- "$@" {listen} --store-bytes 128M;;
                doctor) set -- "$@" {listen} {page} --store-bytes 128M;;
                status) set -- "$@" {page};;
                config) set -- "$@" {page};;
            esac;;
        esac
        exec {sys.executable} "$@"
        """
        there = self.checkout / ".venv/bin"
        curl = f'exec {shutil.which("curl")} --fail-with-body "$@"\n'
        mooncake = f'exec {there}/python -m backends.cli "$@"\n'
        for path, script in (
            (there / "python", python),
            (there / "mooncake", mooncake),
            (self.programs / "mooncake", mooncake),
            (self.programs / "curl", curl),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/bash\n{script}")
            path.chmod(0o755)
        (there.parent / ".installed").touch()  # as after `make setup`

    def _typed(self, text: str) -> list[str]:
        for said, port in self.ports.items():
            text = re.sub(rf"\b{said}\b", port, text)
        text = text.replace("/path/to/checkpoint", str(ROOT / "backends/demo_checkpoint"))
        return ["bash", "-euo", "pipefail", "-c", text]

    def new_lines(self, text: str) -> str:
        """Those that were not typed yet: pages have some in common."""
        lines = [line for line in lines_of(text) if line not in self.typed]
        self.typed.update(lines)
        return "".join(lines)

    def run(self, text: str) -> str:
        """What it printed; it must end with status 0."""
        done = subprocess.run(
            self._typed(text),
            cwd=self.checkout,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S_MAX,
        )
        assert done.returncode == 0, f"status {done.returncode} of:\n{text}\n{done.stdout}"
        return done.stdout

    def serve(self, block: Block) -> None:
        """The server of this block; the one before it is stopped, if it is another one."""
        text = "".join(lines_of(block.text))
        if self.server is not None and self.server.text == text:
            return
        self.stop()
        self.typed.clear()
        log = self.checkout.parent / "serve.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                self._typed(block.text),
                cwd=self.checkout,
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.server = RunningBlock(text, process, log)
        wait_until(self.server.is_ready, f"`{block.first_command}`", READY_S_MAX)

    def stop(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            server.stop()


@pytest.fixture(scope="module")
def typist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typist]:
    somebody = Typist(tmp_path_factory.mktemp("typist"))
    for block in BLOCKS:
        if block.kind == "yaml" and "hosts:" in block.text:
            (somebody.checkout / "cluster.yaml").write_text(block.text)
    try:
        yield somebody
    finally:
        somebody.stop()


def wanted_of(text: str) -> Sequence[str]:
    return [pattern for command, pattern in SAYS.items() if command in text]


@pytest.mark.parametrize("line", ["mooncake config sit a=b", "curl -s 127.0.0.1:9000/v1/nothing"])
def test_a_command_that_fails_is_found(typist: Typist, line: str) -> None:
    typist.serve(next(block for block in RUN if block.is_server))
    with pytest.raises(AssertionError, match="status"):
        typist.run(f"{line}\necho and on")


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_of_a_page_does_what_it_says(typist: Typist, block: Block) -> None:
    if block.is_server:
        typist.serve(block)
        chat = f"curl -s 127.0.0.1:{PORTS[0]}/v1/chat/completions -d "
        body = '{"messages": [{"role": "user", "content": "It is a truth"}], "max_tokens": 4}'
        assert '"finish_reason"' in typist.run(f"{chat} '{body}'")
        return
    if (server := server_of(block)) is not None:
        typist.serve(server)
    assert wanted_of(block.text), f"nothing in SAYS tells whether {block} did its work"
    text = typist.new_lines(block.text)
    said = typist.run(text)
    for pattern in wanted_of(text):
        assert re.search(pattern, said), f"no {pattern!r} in:\n{said}"
    assert '"error"' not in said, said


def test_every_command_that_is_expected_to_say_something_is_on_a_page() -> None:
    text = "".join(block.text for block in RUN)
    assert not [command for command in SAYS if command not in text]
