"""Pipeline groups on a real Triton: the tokens of transformers, from cache and not, and losses.

One server has a whole prefill worker, a group of two and a group of three, whose stages belong to
different storage nodes, so that layers of one block come over NIXL from one stage and by mapped
memory from another.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.config_pbtxt import checkpoint_folder
from mooncake_store.directory.client import DirectoryClient
from tests.backends.engine.checkpoints import load_reference
from tests.backends.engine.reference import Comparison, greedy
from tests.e2e.load import Load, assert_all_answered
from tests.e2e.server import Answer, Server, running, wait_until
from tests.e2e.server_processes import stub_of
from tests.e2e.test_pools import directory_address

# Ten processes of Triton; tests/backends/workers/pipeline has such groups in one process.
pytestmark = pytest.mark.long

B = 64
LENGTHS = (1, B, 5 * B + 3, 17 * B + 1)  # the last one is three chunks
OUTPUT_TOKENS = 12
GROUPS = {"two": ("prefill_1", "prefill_2"), "three": ("prefill_3", "prefill_4", "prefill_5")}
FIRST_STAGES = ("prefill_0", "prefill_1", "prefill_3")  # of one, two and three


def add_groups(repository: Path) -> None:
    shutil.rmtree(repository / "decode_1")
    template = (repository / "prefill_0" / "config.pbtxt").read_text()
    for group, workers in GROUPS.items():
        for stage, worker in enumerate(workers):
            folder = repository / worker
            if not folder.exists():
                shutil.copytree(repository / "prefill_0", folder)
            node = f"s{stage % 2}"
            text = template.replace('string_value: "s0"', f'string_value: "{node}"')
            for name, value in (
                ("group", group),
                ("stage", str(stage)),
                ("stages", str(len(workers))),
            ):
                key = f'key: "pipeline_{name}" value {{ string_value: "{value}" }}'
                text += f"\nparameters {{ {key} }}"
            (folder / "config.pbtxt").write_text(text + "\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    yield from running(
        tmp_path_factory.mktemp("groups"),
        state_dir,
        {"kv_pages": "64"},
        ["--nodes", "s0,s1"],
        prepare=add_groups,
    )


@pytest.fixture(autouse=True)
def whole(server: Server) -> None:
    wait_until(lambda: all(serves(server, w) for w in FIRST_STAGES), "all groups to serve", 60.0)


def ask(server: Server, prompt: list[int], worker: str, tokens: int = OUTPUT_TOKENS) -> Answer:
    return server.ask(
        input_ids=prompt,
        max_tokens=tokens,
        end_id=-1,
        parameters={"prefill_worker": worker, "tenant": worker},
    )


def serves(server: Server, worker: str) -> bool:
    return not ask(server, [5, 6, 7], worker, 2).error


def test_one_two_and_three_stages_give_the_tokens_of_transformers_from_cache_too(
    server: Server, seed: int
) -> None:
    chance, model = random.Random(seed), load_reference(checkpoint_folder("demo", ""))
    prompts = [[chance.randrange(16, 2048) for _ in range(length)] for length in LENGTHS]
    references = [greedy(model, prompt, OUTPUT_TOKENS) for prompt in prompts]
    compared = Comparison()
    for turn in ("fresh", "cached"):
        cases = [
            (worker, prompt, reference)
            for worker in FIRST_STAGES
            for prompt, reference in zip(prompts, references, strict=True)
        ]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda case: ask(server, case[1], case[0]), cases))
        for (worker, prompt, reference), answer in zip(cases, answers, strict=True):
            name = f"{worker}, {len(prompt)} tokens, {turn}"
            assert not answer.error, f"{name}: {answer.error}"
            compared.add(name, answer.output_ids, reference)
            expected_cached = (len(prompt) - 1) // B * B if turn == "cached" else 0
            assert answer.cached_tokens >= expected_cached, name
    compared.check(excluded_share_max=0.2)


# tests/backends/workers/pipeline/ has a stage that leaves and joins again, without servers.
@pytest.mark.parametrize("stage", ["prefill_2", "prefill_1"])
def test_no_request_is_lost_when_a_stage_is_killed_and_the_group_forms_again(
    server: Server, stage: str
) -> None:
    with Load(server) as load:
        load.wait_for_more(5)
        stub_of(server, stage).kill()
        load.wait_for_more(10)
    assert_all_answered(load)
    wait_until(lambda: serves(server, "prefill_1"), "the group to form again", 90.0)


def test_no_request_is_lost_when_a_stage_is_frozen_and_it_goes_on_in_the_group(
    server: Server,
) -> None:
    stage = stub_of(server, "prefill_2")

    def is_given_up() -> bool:
        with DirectoryClient(directory_address(server)) as client:
            return all(worker.worker_id != "prefill_2" for worker in client.workers())

    with Load(server) as load:
        load.wait_for_more(5)
        stage.send_signal(signal.SIGSTOP)
        try:
            wait_until(is_given_up, "the directory to notice", 30.0)
            load.wait_for_more(5)
        finally:
            stage.send_signal(signal.SIGCONT)
        load.wait_for_more(5)
    assert_all_answered(load)
    wait_until(lambda: serves(server, "prefill_1"), "the group to form again", 90.0)
    assert stub_of(server, "prefill_2").pid == stage.pid, "it was started anew instead"
