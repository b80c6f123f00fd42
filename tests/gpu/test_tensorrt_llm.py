"""Engine tensorrt_llm on a real GPU: a real Triton, both hand-overs, greedy text as without us.

    python -m pytest tests/gpu -rs

Skipped without a GPU or without tensorrt_llm. MOONCAKE_GPU_CHECKPOINT names a Hugging Face folder
(Qwen2-0.5B, say; default: the demo checkpoint, whose small heads not every kernel supports). All
workers share GPU 0. MOONCAKE_GPU_STANDIN=1 runs these tests over the stand-in, to test themselves.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends.engine.trtllm import package
from tests.backends.small_tokenizers import DEMO
from tests.e2e.server import Answer, Server, running, wait_until
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

pytestmark = pytest.mark.timeout(3600)
CHECKPOINT = Path(os.environ.get("MOONCAKE_GPU_CHECKPOINT", DEMO)).resolve()
DTYPE, B, PAGE, TOKENS = "bfloat16", 128, 32, 48
READY_S_MAX = 1800.0  # weights are read, kernels are tuned
LENGTHS = (1, PAGE, B, B + 1, 3 * B + PAGE + 5, 1500)
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
    vocabulary = json.loads((CHECKPOINT / "config.json").read_text())["vocab_size"]
    prompts = [[chance.randrange(10, vocabulary - 10) for _ in range(n)] for n in LENGTHS]
    folder = tmp_path_factory.mktemp("plain")
    job = {"prompts": prompts, "tokens": TOKENS, "dtype": DTYPE, "page_tokens": PAGE,
           "kv_tokens": 16384}  # fmt: skip
    (folder / "in.json").write_text(json.dumps(job))
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("plain_llm.py")), str(CHECKPOINT),
         str(folder / "in.json"), str(folder / "out.json")], check=True, timeout=1800,
    )  # fmt: skip
    return Reference(prompts, json.loads((folder / "out.json").read_text()))


@pytest.fixture(scope="module", params=["store", "native"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str]]:
    parameters = {"engine": "tensorrt_llm", "checkpoint": str(CHECKPOINT), "dtype": DTYPE,
                  "block_tokens": str(B), "kv_pages": "128"}  # fmt: skip
    further = {"handoff": request.param, "page_tokens": str(PAGE), "context_tokens_max": "4096",
               "gpus": "" if IS_STANDIN else "0", "gpu_memory_fraction": "0.3"}  # fmt: skip

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
        yield server, request.param


def ask(server: Server, ids: list[int], **workers: str) -> Answer:
    answer = server.ask(input_ids=ids, max_tokens=TOKENS, end_id=-1, parameters=workers)
    assert not answer.error, answer.error
    return answer


def test_greedy_text_is_what_the_engine_says_alone(
    case: tuple[Server, str], reference: Reference
) -> None:
    server, _ = case
    equal = 0
    for ids, alone in zip(reference.prompts, reference.answers, strict=True):
        for prefill in ("prefill_0", "prefill_0", "prefill_1"):
            for decode in ("decode_0", "decode_1"):
                answer = ask(server, ids, prefill_worker=prefill, decode_worker=decode)
                assert answer.output_ids[:1] == alone[:1] or len(ids) > 1000, len(ids)
                equal += answer.output_ids == alone
    assert equal >= EQUAL_MIN * 6 * len(LENGTHS), f"{equal} of {6 * len(LENGTHS)}"
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_hits_are_whole_blocks_of_the_store_and_whole_pages_of_the_engine(
    case: tuple[Server, str], reference: Reference
) -> None:
    server, handoff = case
    ids = [1 + token for token in reference.prompts[-1]]
    first = {"prefill_worker": "prefill_0", "tenant": "hits"}
    assert ask(server, ids, **first).cached_tokens == 0
    one_left = (len(ids) - 1) // PAGE * PAGE
    assert ask(server, ids, **first).cached_tokens == one_left

    def in_store() -> bool:
        longer = ids + ids[: 2 * PAGE]
        answer = ask(server, longer, prefill_worker="prefill_1", tenant="hits")
        return answer.cached_tokens >= len(ids) // B * B

    wait_until(in_store, "the prompt's blocks in the store")
    if handoff == "store":
        loaded, computed = (server.metric("mooncake_handover_tokens_total", path=path)
                            for path in ("loaded", "computed"))  # fmt: skip
        assert loaded > 10 * computed


def test_a_client_that_leaves_frees_everything(case: tuple[Server, str]) -> None:
    server, _ = case
    stream = server.stream(input_ids=[5, 6, 7], max_tokens=2000, end_id=-1, stream=True)
    assert stream.next() is not None
    stream.leave()
    wait_until(server.is_idle, "pages, slots and leases to be free")
