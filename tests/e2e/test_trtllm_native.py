"""handoff "native" on a real Triton: the engines hand KV over, the store serves prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import Server, leftovers, wait_until
from tests.e2e.test_trtllm import PAGE, TOKENS, B, ask, prompt
from tests.e2e.trtllm import expected, serving, set_parameter

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("native")
    yield from serving(folder, state_dir, {}, {"handoff": "native"})


def test_kv_that_the_engines_hand_over_gives_the_same_tokens(server: Server) -> None:
    for length in (1, PAGE, B + 1, 5 * B + 3):
        ids = prompt(length, length)
        for decode in ("decode_0", "decode_1"):
            answer = ask(server, ids, prefill_worker="prefill_0", decode_worker=decode)
            assert answer.output_ids == expected(ids, TOKENS), (length, decode)
    wait_until(server.is_idle, "pages, slots and leases to be free")
    assert server.metric("mooncake_handover_tokens_total") == 0, "nothing went through the store"


def test_prefixes_are_found_in_the_store_all_the_same(server: Server) -> None:
    ids = prompt(40, 4 * B + 7)
    assert ask(server, ids, prefill_worker="prefill_0", tenant="prefix").cached_tokens == 0

    def is_found() -> bool:
        answer = ask(server, ids, prefill_worker="prefill_1", tenant="prefix")
        assert answer.output_ids == expected(ids, TOKENS)
        return answer.cached_tokens == 4 * B

    wait_until(is_found, "the blocks of the first prompt")


def test_one_token_is_prefill_s_alone(server: Server) -> None:
    ids = prompt(41, 100)
    assert ask(server, ids, 1).output_ids == expected(ids, 1)


def test_a_client_that_leaves_frees_everything(server: Server) -> None:
    stream = server.stream(input_ids=prompt(42, 200), max_tokens=7000, end_id=-1, stream=True)
    for _ in range(3):
        assert stream.next() is not None
    stream.leave()
    wait_until(server.is_idle, "pages, slots and leases to be free", deadline_s=10.0)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: ask(server, prompt(n, 90), 5), range(24)))
    for number, answer in enumerate(answers):
        assert answer.output_ids == expected(prompt(number, 90), 5)
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_a_pool_whose_hand_overs_differ_says_so(server: Server) -> None:
    set_parameter(server.repository, "decode_1", "handoff", "store")
    wait_until(
        lambda: "does not fit worker" in server.log.read_text(errors="replace"), "the refusal", 60.0
    )
    assert "native" in server.log.read_text(errors="replace")


def test_without_the_package_the_models_refuse_with_the_remedy_and_nothing_is_left(
    tmp_path: Path, state_dir: Path
) -> None:
    server = Server(tmp_path, state_dir, {"engine": "tensorrt_llm"}, wait=False)
    try:
        assert server.process.wait(60.0) == 1
    finally:
        server.stop()
    said = server.log.read_text(errors="replace")
    assert "the package tensorrt_llm is not installed" in said and "Dockerfile.trtllm" in said
    assert not leftovers(server)
