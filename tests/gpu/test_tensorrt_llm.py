"""Engine tensorrt_llm on a real GPU: a real Triton, both hand-overs, greedy text as without us.

    MOONCAKE_GPU_CHECKPOINT=FOLDER python -m pytest tests/gpu -rs

Skipped without a GPU or without tensorrt_llm. The checkpoint must be named: a Hugging Face folder
that the kernels support, Qwen2-0.5B say (its context of 32k and more takes the long prompt). All
workers share GPU 0, and their engines start one after the other. MOONCAKE_GPU_STANDIN=1 runs these
tests over the stand-in and the demo checkpoint, to test themselves. Nothing here asserts a time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends.doctor.judgement import BROKEN
from backends.doctor.trtllm_contract import contract_findings
from backends.engine.trtllm import package
from tests.backends.small_tokenizers import DEMO
from tests.e2e.server import Answer, Server, Stream, running, take, wait_until
from tests.e2e.trtllm import FAKES, WORKERS, set_parameter

IS_STANDIN = os.environ.get("MOONCAKE_GPU_STANDIN") == "1"
if IS_STANDIN:
    os.environ["PYTHONPATH"] = str(FAKES)
else:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU on this machine", allow_module_level=True)
    if not package.is_installed():
        pytest.skip("tensorrt_llm is not installed (deploy/README.md)", allow_module_level=True)
    if "MOONCAKE_GPU_CHECKPOINT" not in os.environ:
        pytest.fail("name a Hugging Face folder: MOONCAKE_GPU_CHECKPOINT=...", pytrace=False)

pytestmark = pytest.mark.timeout(7200)
CHECKPOINT = DEMO if IS_STANDIN else Path(os.environ["MOONCAKE_GPU_CHECKPOINT"]).resolve()
CONFIG = json.loads((CHECKPOINT / "config.json").read_text())
DTYPE, B, PAGE, TOKENS = "bfloat16", 128, 32, 48
# Of the whole case: four engines one after the other, each reads weights and tunes kernels.
READY_S_MAX, STOP_S_MAX = 3600.0, 600.0
ANSWER_S_MAX = 600.0  # the first request of a shape may compile a kernel
IDLE_S_MAX = 120.0
LENGTHS = (1, PAGE, B, B + 1, 3 * B + PAGE + 5, 1500)
LONG = 32_768 if CONFIG["max_position_embeddings"] >= 32_768 else 4096
LONG -= 4 * TOKENS  # room for the answer
KV_PAGES = (LONG + 8 * 1024) // B
STREAMS = 16
# Tokens computed in another batch are rounded otherwise: a near-tie may fall the other way.
EQUAL_MIN = 0.8


@dataclass(frozen=True, slots=True)
class Reference:
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What TensorRT-LLM says by itself."""
    chance = random.Random(5)
    vocabulary = CONFIG["vocab_size"]
    lengths = [*LENGTHS, *[200 + n for n in range(STREAMS)], LONG]
    prompts = [[chance.randrange(10, vocabulary - 10) for _ in range(n)] for n in lengths]
    folder = tmp_path_factory.mktemp("plain")
    job = {
        "prompts": prompts,
        "tokens": TOKENS,
        "dtype": DTYPE,
        "page_tokens": PAGE,
        "kv_tokens": LONG + 16384,
        "context_tokens": LONG + 2 * TOKENS,
    }
    (folder / "in.json").write_text(json.dumps(job))
    subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("plain_llm.py")),
            str(CHECKPOINT),
            str(folder / "in.json"),
            str(folder / "out.json"),
        ],
        check=True,
        timeout=READY_S_MAX,
    )
    return Reference(prompts, json.loads((folder / "out.json").read_text()))


@pytest.mark.skipif(IS_STANDIN, reason="the stand-in has no sources of its own")
def test_the_installed_package_has_what_is_used_of_it() -> None:
    """As `mooncake doctor --engine tensorrt_llm`. If this fails, read it before anything else."""
    found = list(contract_findings(None))
    assert not [str(each) for each in found if each.state == BROKEN], "\n".join(map(str, found))


@pytest.fixture(scope="module", params=["store", "native"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str]]:
    parameters = {
        "engine": "tensorrt_llm",
        "checkpoint": str(CHECKPOINT),
        "dtype": DTYPE,
        "block_tokens": str(B),
        "kv_pages": str(KV_PAGES),
    }
    further = {
        "handoff": request.param,
        "page_tokens": str(PAGE),
        "aside_load_mib": "1",
        "context_tokens_max": str(LONG + 4 * TOKENS),
        "gpus": "0",
        "gpu_memory_fraction": "0.2",
    }

    def prepare(repository: Path) -> None:
        for model in WORKERS:
            for name, value in further.items():
                set_parameter(repository, model, name, value)
        # Both prefill workers on one node, so that one finds what the other has put.
        set_parameter(repository, "prefill_1", "store_node", "s0")

    folder = tmp_path_factory.mktemp(request.param)
    for server in running(
        folder, folder / "state", parameters, ("--store-bytes", "4G"), prepare, READY_S_MAX
    ):
        server.stop_s_max = STOP_S_MAX
        yield server, request.param


def begin(server: Server, ids: list[int], tokens: int = TOKENS, **workers: str) -> Stream:
    return server.stream(
        input_ids=ids, max_tokens=tokens, end_id=-1, stream=True, parameters=workers
    )


def end(stream: Stream) -> Answer:
    answer = Answer()
    while (result := stream.next(ANSWER_S_MAX)) is not None:  # raises what went wrong
        take(answer, result)
    stream.leave()
    return answer


def ask(server: Server, ids: list[int], **workers: str) -> Answer:
    return end(begin(server, ids, **workers))


def is_free(server: Server) -> None:
    wait_until(server.is_idle, "pages, slots and leases to be free", IDLE_S_MAX)


def test_greedy_text_is_what_the_engine_says_alone(
    case: tuple[Server, str], reference: Reference
) -> None:
    server, _ = case
    equal = 0
    for ids, alone in zip(reference.prompts[: len(LENGTHS)], reference.answers, strict=False):
        for prefill in ("prefill_0", "prefill_0", "prefill_1"):
            for decode in ("decode_0", "decode_1"):
                answer = ask(server, ids, prefill_worker=prefill, decode_worker=decode)
                assert answer.output_ids[:1] == alone[:1] or len(ids) > 1000, len(ids)
                equal += answer.output_ids == alone
    assert equal >= EQUAL_MIN * 6 * len(LENGTHS), f"{equal} of {6 * len(LENGTHS)}"
    is_free(server)


def test_hits_are_whole_blocks_of_the_store_and_whole_pages_of_the_engine(
    case: tuple[Server, str], reference: Reference
) -> None:
    server, handoff = case
    ids = [1 + token for token in reference.prompts[len(LENGTHS) - 1]]
    first = {"prefill_worker": "prefill_0", "tenant": "hits"}
    assert ask(server, ids, **first).cached_tokens == 0
    one_left = (len(ids) - 1) // PAGE * PAGE
    assert ask(server, ids, **first).cached_tokens == one_left

    def in_store() -> bool:
        longer = ids + ids[: 2 * PAGE]
        answer = ask(server, longer, prefill_worker="prefill_1", tenant="hits")
        return answer.cached_tokens >= len(ids) // B * B

    wait_until(in_store, "the prompt's blocks in the store", IDLE_S_MAX)
    if handoff == "store":
        loaded, computed = (
            server.metric("mooncake_handover_tokens_total", path=path)
            for path in ("loaded", "computed")
        )
        assert loaded > 10 * computed


def test_a_client_that_leaves_frees_everything(case: tuple[Server, str]) -> None:
    server, _ = case
    stream = begin(server, [5, 6, 7], 2000)
    assert stream.next(ANSWER_S_MAX) is not None
    stream.leave()
    is_free(server)


def streams_of(reference: Reference) -> list[tuple[list[int], list[int]]]:
    """Prompts and what the engine says to them alone."""
    pairs = list(zip(reference.prompts, reference.answers, strict=True))
    return pairs[len(LENGTHS) : len(LENGTHS) + STREAMS]


def test_requests_that_end_in_the_same_steps_are_all_right_and_leave_nothing(
    case: tuple[Server, str], reference: Reference
) -> None:
    """An executor that ends one save a step must not forget the others' pages."""
    server, _ = case
    for decode in ("decode_0", "decode_1"):
        pairs = streams_of(reference)
        going = [begin(server, ids, decode_worker=decode) for ids, _ in pairs]
        answers = [end(stream).output_ids for stream in going]
        equal = sum(answer == alone for answer, (_, alone) in zip(answers, pairs, strict=True))
        assert equal >= EQUAL_MIN * STREAMS, f"{equal} of {STREAMS}"
        is_free(server)


def test_clients_that_leave_under_load_harm_nobody(
    case: tuple[Server, str], reference: Reference
) -> None:
    server, _ = case
    chance = random.Random(7)
    for _ in range(3):
        pairs = streams_of(reference)
        going = [begin(server, ids) for ids, _ in pairs]
        leaving = set(chance.sample(range(STREAMS), STREAMS // 2))
        for number in leaving:
            for _ in range(chance.choice([0, 1, 5])):  # before, at and after the first token
                if going[number].next(ANSWER_S_MAX) is None:
                    break  # many tokens may come at once, and it has ended
            going[number].leave()
        stay = [number for number in range(STREAMS) if number not in leaving]
        equal = sum(end(going[number]).output_ids == pairs[number][1] for number in stay)
        assert equal >= EQUAL_MIN * len(stay), f"{equal} of {len(stay)}"
    # And what those who left had begun is not taken for computed.
    equal = sum(ask(server, ids).output_ids == alone for ids, alone in streams_of(reference))
    assert equal >= EQUAL_MIN * STREAMS, f"{equal} of {STREAMS} afterwards"
    is_free(server)


def test_a_long_prefix_is_loaded_beside_running_streams(
    case: tuple[Server, str], reference: Reference
) -> None:
    server, handoff = case
    ids, alone = reference.prompts[-1], reference.answers[-1]
    ask(server, ids, prefill_worker="prefill_0", decode_worker="decode_0")  # into the store
    pairs = streams_of(reference)[:8]
    going = [begin(server, prompt, decode_worker="decode_1") for prompt, _ in pairs]
    for stream in going:
        assert stream.next(ANSWER_S_MAX) is not None  # it runs
    started_s = time.monotonic()
    answer = ask(server, ids, prefill_worker="prefill_1", decode_worker="decode_1")
    print(
        f"{handoff}: {len(ids)} tokens loaded and answered in {time.monotonic() - started_s:.2f} s"
    )
    assert answer.output_ids[:1] == alone[:1]
    assert answer.cached_tokens >= len(ids) // B * B - B
    for stream in going:
        end(stream)
    again = [ask(server, prompt, decode_worker="decode_1").output_ids for prompt, _ in pairs]
    equal = sum(said == alone for said, (_, alone) in zip(again, pairs, strict=True))
    assert equal >= EQUAL_MIN * len(pairs), f"{equal} of {len(pairs)}"
    is_free(server)
