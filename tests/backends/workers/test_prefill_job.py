"""A prompt's tokens are counted by how their KV came, each once; its mistakes are its client's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.engine.sampling_params import SamplingParams
from backends.errors import InvalidRequest
from backends.metrics.page import MetricPage, Observations
from backends.workers.jobs import PrefillJob
from backends.workers.kv_writer import BlockPut
from backends.workers.lifecycle.events import On
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.protocol import BlockRef, FirstToken, PrefillRequest
from tests.backends.metrics.test_page import Triton

BLOCK_TOKENS, BLOCK_BYTES = 64, 1000


class Silent:
    def prefilled(self, *_: object) -> None: ...
    def fail(self, *_: object) -> None: ...


def job(
    prompt_tokens: int,
    cached_tokens: int,
    fetched_blocks: int,
    released_tokens: int = 0,
    inbox: str = "",
    **sampling: Any,
) -> PrefillJob:
    params = SamplingParams(**({"max_tokens": 1} | sampling))
    request = PrefillRequest("r", prompt_tokens, params, "", 0, "", inbox, 0)
    made = PrefillJob(
        request=request,
        client=Silent(),
        submitted_s=100.0,
        token_ids=np.zeros(prompt_tokens + released_tokens, np.int32),
        put=BlockPut("r", prompt_tokens, [], [], first_block=0),
    )
    made.cached_tokens, made.fetched_blocks = cached_tokens, fetched_blocks
    made.load_s, made.compute_s, made.computed_at_s = 0.5, 1.0, 102.0
    return made


@pytest.mark.parametrize(
    ("cached_tokens", "fetched_blocks", "expected"),
    [
        (0, 0, {"computed": 300, "local": 0, "fetched": 0}),
        (256, 0, {"computed": 44, "local": 256, "fetched": 0}),
        (256, 3, {"computed": 44, "local": 64, "fetched": 192}),
        (256, 9, {"computed": 44, "local": 0, "fetched": 256}),  # some did not make it into pages
    ],
)
def test_each_token_came_by_one_path(
    cached_tokens: int, fetched_blocks: int, expected: dict[str, int]
) -> None:
    triton, observations = Triton(), Observations()
    prompt = job(300, cached_tokens, fetched_blocks)
    prompt.observe(prompt.reply("life", BLOCK_BYTES), BLOCK_TOKENS, observations)
    MetricPage("prefill", triton).take(observations)
    paths = {path: triton["mooncake_prompt_tokens_total", path] for path in expected}
    assert paths == expected
    assert triton["mooncake_output_tokens_total"] == 1
    assert triton["mooncake_prefix_load_seconds"] == (1 if cached_tokens else 0)
    assert triton["mooncake_prefill_queue_seconds"] == 1


def test_waiting_is_what_was_neither_loading_nor_computing() -> None:
    assert job(300, 0, 0).queue_s == pytest.approx(0.5)


def test_blocks_are_handed_over_unless_the_engines_do_it_or_decode_computes_again() -> None:
    prompt = job(300, 0, 0)
    ref = BlockRef(0, "s0", 1, 1, 0)
    prompt.put.refs = {0: ref}
    assert prompt.reply("life", BLOCK_BYTES).blocks == [ref]
    prompt.native = b"where it lies"
    assert prompt.reply("life", BLOCK_BYTES).blocks == []
    prompt.native, prompt.hands_over_blocks = b"", False
    assert prompt.reply("life", BLOCK_BYTES).blocks == []


INBOX = "ipc://frontend"


def test_the_first_token_goes_ahead_when_the_answer_surely_goes_on() -> None:
    message = job(300, 256, 0, inbox=INBOX, max_tokens=2).first_token(7)
    assert message == FirstToken("r", 7, 256)


@pytest.mark.parametrize(
    "asked",
    [
        {"inbox": "", "max_tokens": 9},
        {"inbox": INBOX, "max_tokens": 1},
        {"inbox": INBOX, "max_tokens": 4, "released_tokens": 3},
        {"inbox": INBOX, "max_tokens": 9, "end_ids": (7,)},
        {"inbox": INBOX, "max_tokens": 9, "stop_words": ("x",)},
    ],
)
def test_a_token_that_could_end_the_answer_comes_with_the_reply(asked: dict[str, Any]) -> None:
    assert job(300, 0, 0, **asked).first_token(7) is None


def test_what_is_wrong_with_a_request_is_told_to_its_client_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuses(loaded: PrefillJob) -> None:
        raise InvalidRequest("this TensorRT-LLM does not support min_p")

    worker: Any = object.__new__(PrefillWorker)
    worker.driver = SimpleNamespace(start=refuses)
    prompt = job(100, 0, 0)
    events: list[Any] = []
    worker.post = lambda job, *event: events.append(event)
    worker._work(prompt, worker.driver.start)
    ((event, error),) = events
    assert event is On.LOAD_FAILED
    assert str(error) == "this TensorRT-LLM does not support min_p"
    assert not caplog.records
