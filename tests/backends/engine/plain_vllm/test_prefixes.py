"""Prefixes of plain vLLM servers in a real store, without vLLM: what is loaded, saved and freed."""

from __future__ import annotations

import math
import random
import secrets
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.engine.connected.messages import Stage
from backends.engine.plain_vllm.prefixes import SharedPrefixes, SharingSettings
from mooncake_store.block_keys import block_keys, chain_seed
from mooncake_store.client.client import StoreClient
from mooncake_store.transports.transport import ByteSpan
from tests.e2e.server import wait_until
from tests.mooncake_store.processes import SiteProcesses

pytestmark = pytest.mark.servers

BLOCK, BLOCK_BYTES = 16, 4096  # tokens, bytes
POOL_BLOCKS = 8


def over() -> Future[None]:
    found: Future[None] = Future()
    found.set_result(None)
    return found


class Sharing:
    """A server's scheduler, without its engine: `fill` is a pass that saves."""

    def __init__(self, address: str, name: str = "print", **settings: float) -> None:
        self.client = StoreClient(address, "a")
        self.pool = np.zeros(POOL_BLOCKS * BLOCK_BYTES, np.uint8)
        self.client.register(self.pool)
        self.stages: dict[str, Stage] = {}
        self.prefixes = SharedPrefixes(
            SharingSettings(block_tokens=BLOCK, **settings),  # type: ignore[arg-type]
            self.client,
            name,
            self.pool,
            BLOCK_BYTES,
        )
        self.prefixes.connect(self)

    def stage(self, stage: Stage, timeout_s: float) -> Future[None]:
        assert stage.request_id not in self.stages
        self.stages[stage.request_id] = stage
        return over()

    def unstage(self, request_id: str, timeout_s: float) -> Future[None]:
        del self.stages[request_id]
        return over()

    def ask(self, name: str, prompt: Sequence[int], salt: str = "", local: int = 0) -> bool:
        found: list[bool] = []

        def is_known() -> bool:
            answer = self.prefixes.ask(name, prompt, salt, local)
            found.extend([] if answer is None else [answer])
            return answer is not None

        wait_until(is_known, "the prefix to be read")
        self.prefixes.check()
        return found[0]

    def loaded(self, name: str, prompt: Sequence[int], salt: str = "", local: int = 0) -> bytes:
        """The blocks that were found, from those on that vLLM does not have."""
        assert self.ask(name, prompt, salt, local)
        stage = self.stages[name]
        blocks = range(local // BLOCK, stage.loaded_tokens // BLOCK)
        return b"".join(self.page(stage.places[block]).tobytes() for block in blocks)

    def page(self, place: int) -> np.ndarray:
        return self.pool[place : place + BLOCK_BYTES]

    def fill(self, name: str, chance: random.Random) -> bytes:
        """Save all blocks that are not loaded; their bytes."""
        stage = self.stages[name]
        saved = b""
        for block in range(stage.loaded_tokens // BLOCK, len(stage.places)):
            page = self.page(stage.places[block])
            page[:] = np.frombuffer(chance.randbytes(BLOCK_BYTES), np.uint8)
            saved += page.tobytes()
            self.prefixes.saved(name, (block + 1) * BLOCK)
        return saved

    def end(self, *names: str) -> None:
        for name in names:
            self.prefixes.finished(name)
        wait_until(lambda: self.prefixes.used_pages == 0, "the pages to be free")
        self.prefixes.check()

    def close(self) -> None:
        self.prefixes.close()
        self.client.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path_factory.mktemp("site"))
    made.node("a", 32)
    yield made
    made.close()


@pytest.fixture
def two(site: SiteProcesses) -> Iterator[tuple[Sharing, Sharing]]:
    name = secrets.token_hex(4)  # nothing of another test is found
    made = Sharing(site.address, name), Sharing(site.address, name)
    yield made
    for each in made:
        each.close()


@pytest.fixture
def chance(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """In each test of this module other bytes, because they share a node."""
    return random.Random(f"{seed} {request.node.name}")


def prompt_of(tokens: int, chance: random.Random) -> list[int]:
    return [chance.randrange(50_000) for _ in range(tokens)]


def test_a_block_that_one_server_saved_is_loaded_by_the_other(
    two: tuple[Sharing, Sharing], chance: random.Random
) -> None:
    first, second = two
    prompt = prompt_of(3 * BLOCK + 5, chance)
    assert first.loaded("1", prompt) == b""
    saved = first.fill("1", chance)
    first.end("1")
    assert len(saved) == 3 * BLOCK_BYTES
    assert second.loaded("2", prompt) == saved
    longer = prompt[: 2 * BLOCK] + prompt_of(BLOCK, chance)
    assert second.loaded("3", longer) == saved[: 2 * BLOCK_BYTES]
    second.end("2", "3")


def test_prompts_of_another_salt_or_fingerprint_share_nothing(
    two: tuple[Sharing, Sharing], site: SiteProcesses, chance: random.Random
) -> None:
    first, second = two
    prompt = prompt_of(BLOCK, chance)
    first.ask("1", prompt)
    first.fill("1", chance)
    first.end("1")
    assert second.loaded("2", prompt, salt="tenant") == b""
    other = Sharing(site.address, "another fingerprint")
    assert other.loaded("3", prompt) == b""
    other.close()


def test_blocks_that_vllm_has_are_not_read_again_and_are_needed_until_the_end(
    two: tuple[Sharing, Sharing], chance: random.Random
) -> None:
    first, second = two
    prompt = prompt_of(3 * BLOCK, chance)
    first.ask("1", prompt)
    saved = first.fill("1", chance)
    first.end("1")
    assert second.loaded("2", prompt, local=BLOCK) == saved[BLOCK_BYTES:]
    assert not second.pool[:BLOCK_BYTES].any(), "the first block was read"
    assert second.prefixes.ask("2", prompt, "", 0) is False, "vLLM has evicted it meanwhile"
    assert second.prefixes.ask("2", prompt, "", 2 * BLOCK) is True
    second.end("2")


def test_prompts_without_a_whole_block_or_beyond_the_pool_are_computed(
    two: tuple[Sharing, Sharing], chance: random.Random
) -> None:
    server = two[0]
    assert server.prefixes.ask("short", prompt_of(BLOCK - 1, chance), "", 0) is False
    assert server.prefixes.ask("long", prompt_of((POOL_BLOCKS + 1) * BLOCK, chance), "", 0) is False
    server.end("short", "long")


def test_a_prompt_waits_for_pages_until_the_deadline(
    site: SiteProcesses, chance: random.Random
) -> None:
    server = Sharing(site.address, "waits", deadline_s=3600.0)
    prompt = prompt_of(BLOCK, chance)
    assert server.ask("all", prompt_of(POOL_BLOCKS * BLOCK, chance))
    assert server.prefixes.ask("waits", prompt, "", 0) is None
    assert server.prefixes.ask("dropped", prompt, "", 0) is None
    server.prefixes.finished("dropped")
    server.fill("all", chance)  # its pages are free although vLLM has not ended it
    assert server.ask("waits", prompt)
    assert server.ask("more", prompt_of((POOL_BLOCKS - 1) * BLOCK, chance))
    assert server.prefixes.ask("late", prompt, "", 0) is None
    server.prefixes._settings = SharingSettings(block_tokens=BLOCK, deadline_s=1e-9)
    assert server.prefixes.ask("late", prompt, "", 0) is False
    server.end("all", "waits", "more", "late")
    assert not server.prefixes._jobs
    server.close()


def test_pages_of_a_prompt_are_free_when_its_last_block_is_saved_or_loaded(
    two: tuple[Sharing, Sharing], chance: random.Random
) -> None:
    first, second = two
    prompt = prompt_of(3 * BLOCK, chance)
    first.ask("1", prompt)
    first.fill("1", chance)
    wait_until(lambda: first.prefixes.used_pages == 0, "its pages to be free")
    assert first.prefixes.ask("1", prompt, "", 0) is False, "preempted: it is computed"
    second.ask("2", prompt)
    second.prefixes.claimed("2", 0, 3 * BLOCK)
    assert second.prefixes.used_pages == 3
    second.prefixes.loaded("2")
    wait_until(lambda: second.prefixes.used_pages == 0, "its pages to be free")
    second.ask("3", prompt, local=2 * BLOCK)
    second.prefixes.claimed("3", 2 * BLOCK, 0)
    first.end("1")
    second.end("2", "3")


def test_after_a_reset_nothing_older_is_loaded_or_put(
    two: tuple[Sharing, Sharing], chance: random.Random
) -> None:
    first, second = two
    prompt, other = prompt_of(2 * BLOCK, chance), prompt_of(2 * BLOCK, chance)
    first.ask("1", prompt)
    first.fill("1", chance)
    first.end("1")
    first.ask("going", other)
    first.prefixes.reset()
    first.fill("going", chance)
    first.end("going")
    assert first.loaded("2", prompt) == b""
    assert len(second.loaded("3", prompt)) == 2 * BLOCK_BYTES, "weights of the second are the same"
    assert second.loaded("4", other) == b""
    first.end("2")
    second.end("3", "4")


class LateClient:
    """A store whose reads go on after their deadline."""

    def __init__(self) -> None:
        self.is_late = True
        self.targets: list[np.ndarray] = []
        self.put_blocks = 0

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[np.ndarray], *, deadline_s: float
    ) -> list[bool]:
        self.targets = list(buffers)
        return [True, *[False] * (len(keys) - 1)]

    def put(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, deadline_s: float
    ) -> list[bool]:
        self.put_blocks += len(keys)
        return [True] * len(keys)

    def pending(self) -> list[tuple[np.ndarray, ByteSpan]]:
        late = self.targets[1:] if self.is_late else []
        return [(target, ByteSpan(0, target.nbytes)) for target in late]


def test_pages_that_a_late_read_may_write_are_neither_saved_nor_used_again(
    site: SiteProcesses, chance: random.Random
) -> None:
    server, late = Sharing(site.address, "late"), LateClient()
    server.prefixes._client = late  # type: ignore[assignment]
    assert server.ask("1", prompt_of(4 * BLOCK, chance)) is False
    server.prefixes.finished("1")
    wait_until(lambda: server.prefixes.used_pages == 3, "the first page to be free")
    assert server.prefixes.ask("2", prompt_of(6 * BLOCK, chance), "", 0) is None, "5 are free"
    late.is_late = False
    assert server.ask("2", prompt_of(6 * BLOCK, chance))
    server.end("2")
    assert not late.put_blocks
    server.close()


def test_a_damaged_block_ends_the_prefix(
    two: tuple[Sharing, Sharing], site: SiteProcesses, chance: random.Random
) -> None:
    first, second = two
    prompt = prompt_of(3 * BLOCK, chance)
    first.ask("1", prompt)
    saved = first.fill("1", chance)
    first.end("1")
    segment = np.memmap(site.nodes["a"].path, np.uint8, "r+")
    at = segment.tobytes().find(saved[BLOCK_BYTES : 2 * BLOCK_BYTES])
    assert at > 0
    segment[at + 7] ^= 1
    assert second.loaded("2", prompt) == saved[:BLOCK_BYTES]
    second.end("2")


def test_requests_that_end_at_any_time_leave_no_page(
    two: tuple[Sharing, Sharing], chance: random.Random
) -> None:
    prompts = [prompt_of(BLOCK * chance.randrange(1, 4), chance) for _ in range(6)]
    going: list[tuple[Sharing, str]] = []
    for number in range(300):
        server, name = chance.choice(two), str(number)
        server.prefixes.ask(name, chance.choice(prompts), "", BLOCK * chance.randrange(2))
        going.append((server, name))
        if chance.random() < 0.5:
            server, name = chance.choice(going)
            if name in server.stages:
                server.fill(name, chance)
        while len(going) > chance.randrange(1, 5):
            server, name = going.pop(chance.randrange(len(going)))
            server.prefixes.finished(name)
            server.prefixes.finished(name)  # harmless
        for each in two:
            each.prefixes.check()
    for server, name in going:
        server.prefixes.finished(name)
    for each in two:
        each.end()
        assert not each.stages and not each.prefixes._jobs


def test_without_the_directory_prompts_are_computed_and_later_shared_again(
    tmp_path: Path, chance: random.Random
) -> None:
    site = SiteProcesses(tmp_path)
    site.node("a", 8)
    server = Sharing(site.address)
    try:
        prompt = prompt_of(2 * BLOCK, chance)
        server.ask("1", prompt)
        server.fill("1", chance)
        server.end("1")
        site.directory.end(signal.SIGKILL)
        assert server.ask("2", prompt_of(BLOCK, chance)) is False
        server.prefixes._paused_until_s = math.inf
        assert server.prefixes.ask("3", prompt_of(BLOCK, chance), "", 0) is False, "not asked"
        server.end("2", "3")
        site.directory.start()
        server.prefixes._paused_until_s = 0.0
        wait_until(lambda: all(server.client.exist([*server_keys(server, prompt)])), "the blocks")
        assert len(server.loaded("4", prompt)) == 2 * BLOCK_BYTES
        server.end("4")
    finally:
        server.close()
        site.close()


def server_keys(server: Sharing, prompt: Sequence[int]) -> list[bytes]:
    seed = chain_seed(server.prefixes._fingerprint)
    return block_keys(prompt, BLOCK, seed)


def test_every_mistake_in_the_settings_is_named() -> None:
    given = {"block_tokens": 0, "pool_bytes": "many", "node_id": 3, "deadline_s": "1", "hue": "red"}
    with pytest.raises(ValueError, match="extra_config") as raised:
        SharingSettings.of(given)
    assert all(name in str(raised.value) for name in given)
    assert SharingSettings.of({"pool_bytes": "2GiB"}).pool_bytes == 2**31
    assert SharingSettings.of({"deadline_s": 1}).deadline_s == 1
    assert isinstance(SharingSettings.of({"block_tokens": 64.0}).block_tokens, int)


@pytest.mark.parametrize(("page_tokens", "expected"), [(16, 64), (48, 96), (64, 64), (128, 128)])
def test_blocks_of_the_store_are_whole_pages_of_vllm(page_tokens: int, expected: int) -> None:
    assert SharingSettings().of_pages(page_tokens).block_tokens == expected
    assert SharingSettings(block_tokens=256).of_pages(page_tokens).block_tokens == 256
