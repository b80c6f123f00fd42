"""Two plain vLLM servers and `mooncake store serve`, as docs/how-to/serve-with-vllm.md starts them:
the second server computes no whole block that the first has computed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.engine.connected.host_memory import SHM
from backends.engine.plain_vllm.prefixes import TRANSFER_CONFIG
from loadtest.harness.server import own_ports
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.memory.index_table import table_path
from tests.e2e.server import ROOT, wait_until
from tests.vllm.serving import BORDERS, PYTHON, plain_tokens, prompts_of, random_checkpoint

TOKENS, BLOCK = 24, 64
NODE = f"test-{os.getpid()}"  # unlike those of a store that runs on this machine
START_S_MAX = 240.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextlib.contextmanager
def started(words: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[Any]:
    """A program in a process group of its own, which ends with the `with` block."""
    with log.open("w") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass
class PlainServer:
    port: int
    log: Path
    process: Any

    def _get(self, path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        with DIRECT.open(request, timeout=60) as reply:
            answer: bytes = reply.read()
        return answer

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            self._get("/health")
            return True
        return False

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """(answer, tokens of the prompt that were not computed)"""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = json.loads(self._get("/v1/completions", body))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


@dataclass
class SharedStore:
    servers: list[PlainServer]
    store: Any  # the process of `mooncake store serve`
    address: str  # of its directory
    prompts: list[list[int]]
    expected: list[list[int]]

    def blocks(self) -> int:
        """In the store. They are put into it after the answer."""
        with DirectoryClient(self.address) as directory:
            return len(directory.blocks_on(NODE, 10_000))

    def nodes(self) -> list[psutil.Process]:
        return [
            each
            for each in psutil.Process(self.store.pid).children(recursive=True)
            if "mooncake_store.node" in " ".join(each.cmdline())
        ]


def _remove_memory(address: str) -> None:
    """Of the node, which a test kills."""
    for path in (*SHM.glob(f"mooncake-node-*{NODE}"), Path(table_path(f"{SHM}/", address))):
        path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStore]:
    folder = tmp_path_factory.mktemp("shared")
    checkpoint = random_checkpoint("llama", folder / "checkpoint")
    prompts = prompts_of((*BORDERS, 200, 300, 400), seed=31)
    expected = plain_tokens(checkpoint, prompts, TOKENS)
    address = f"ipc://{folder}/s/directory"
    variables = {
        "MOONCAKE_DIRECTORY": address,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    words = [sys.executable, "-m", "backends.cli", "store", "serve", "--folder", str(folder / "s")]
    words += ["--store-bytes", "64M", "--nodes", NODE]
    with contextlib.ExitStack() as steps:
        steps.callback(_remove_memory, address)
        store = steps.enter_context(started(words, folder / "store.log", {}))
        servers = []
        for number in range(2):
            port, log = own_ports(1)[0], folder / f"vllm-{number}.log"
            words = [str(PYTHON.parent / "vllm"), "serve", str(checkpoint), "--port", str(port)]
            words += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "1536"]
            words += ["--enforce-eager", "--enable-prompt-tokens-details"]
            words += [
                "--served-model-name",
                "m",
                "--kv-transfer-config",
                json.dumps(TRANSFER_CONFIG),
            ]
            process = steps.enter_context(started(words, log, variables))
            servers.append(PlainServer(port, log, process))
        for server in servers:
            wait_until(server.is_ready, f"{server.log} to say that it is ready", START_S_MAX)
        yield SharedStore(servers, store, address, prompts, expected)


def test_the_second_server_computes_no_whole_block_that_the_first_has_computed(
    shared: SharedStore,
) -> None:
    prompts, expected = shared.prompts[: len(BORDERS)], shared.expected[: len(BORDERS)]
    first, second = shared.servers
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert first.ask(prompt) == (tokens, 0), len(prompt)
    wait_until(lambda: shared.blocks() >= sum(len(prompt) // BLOCK for prompt in prompts), "blocks")
    for prompt, tokens in zip(prompts, expected, strict=True):
        # vLLM computes the last token of a prompt in any case.
        cached = min(len(prompt) // BLOCK * BLOCK, len(prompt) - 1)
        assert second.ask(prompt) == (tokens, cached), len(prompt)


def test_servers_go_on_when_the_node_and_the_store_are_killed(shared: SharedStore) -> None:
    prompts, expected = shared.prompts[len(BORDERS) :], shared.expected[len(BORDERS) :]
    first, second = shared.servers
    blocks = shared.blocks()
    assert first.ask(prompts[0])[0] == expected[0]
    wait_until(lambda: shared.blocks() == blocks + len(prompts[0]) // BLOCK, "blocks")
    for node in shared.nodes():
        node.kill()
    # The memory of a dead node may still be mapped; its blocks are verified.
    assert second.ask(prompts[0]) in [(expected[0], 0), (expected[0], len(prompts[0]) // 64 * 64)]
    assert first.ask(prompts[1])[0] == expected[1]
    os.killpg(shared.store.pid, signal.SIGKILL)
    assert second.ask(prompts[1])[0] == expected[1]
    assert first.ask(prompts[2])[0] == second.ask(prompts[2])[0] == expected[2]
