"""Logprobs of whole requests: of every token, once, whatever is held back or lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import InvalidRequest, WorkerUnavailable
from backends.tensors import PROMPT_OUTPUTS
from backends.text.tokenizer import Tokenizer
from bench.harness.generate import generate
from tests.backends.engine.checkpoints import load_reference
from tests.backends.frontend.test_whole_requests import (
    Client,
    Outputs,
    Site,
    prompt,
    site,  # noqa: F401  (a fixture)
    wanted,
)
from tests.backends.small_tokenizers import DEMO

NAMES = ("output_log_probs", "top_token_ids", "top_log_probs")


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine.load(DEMO, pages_max=32, block_tokens=64)


class LogprobsClient(Client):
    outputs = Client.outputs | set(NAMES)

    def __init__(self) -> None:
        super().__init__()
        self.log_probs: list[float] = []
        self.top_ids: list[list[int]] = []
        self.top_log_probs: list[list[float]] = []

    def send(self, outputs: Outputs, is_final: bool = False) -> None:
        ids, best = outputs["output_ids"], outputs["top_token_ids"]
        assert len(ids) == len(outputs["output_log_probs"]) == len(best), "they come together"
        assert best.shape == outputs["top_log_probs"].shape
        self.log_probs += outputs["output_log_probs"].tolist()
        self.top_ids += best.tolist()
        self.top_log_probs += outputs["top_log_probs"].tolist()
        super().send(outputs, is_final)

    def check(self, prompt_ids: list[int]) -> None:
        """All of them, to what transformers says of this prompt and this answer."""
        model = load_reference(DEMO)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt_ids + self.ids])).logits[0]
        theirs = torch.log_softmax(logits[len(prompt_ids) - 1 : -1].float(), -1).numpy()
        assert len(self.log_probs) == len(self.ids)
        own = theirs[np.arange(len(self.ids)), self.ids]
        np.testing.assert_allclose(self.log_probs, own, atol=1e-3)
        best = np.take_along_axis(theirs, np.array(self.top_ids), axis=1)
        np.testing.assert_allclose(self.top_log_probs, best, atol=1e-3)
        np.testing.assert_allclose(best[:, 0], theirs.max(axis=1), atol=1e-3)


def asked(site: Site, ids: list[int], **inputs: Any) -> LogprobsClient:  # noqa: F811
    client = LogprobsClient()
    site.submit(client, ids, return_log_probs=True, top_logprobs=3, **inputs)
    return client


@pytest.mark.parametrize("is_stream", [True, False])
def test_every_token_from_the_first_has_those_of_transformers(
    site: Site,  # noqa: F811
    engine: TorchEngine,
    is_stream: bool,
) -> None:
    ids = prompt(1, 100)
    client = asked(site, ids, max_tokens=20, stream=is_stream)
    assert client.wait() == wanted(engine, ids, 20)
    client.check(ids)
    drawn = asked(site, ids, max_tokens=20, stream=is_stream, temperature=1.5, seed=4)
    drawn.wait()
    drawn.check(ids)
    site.check_idle()


def test_an_answer_of_one_token_has_them_too(site: Site) -> None:  # noqa: F811
    ids = prompt(4, 70)
    client = asked(site, ids, max_tokens=1)
    assert len(client.wait()) == 1
    client.check(ids)
    site.check_idle()


def test_tokens_that_are_held_back_for_a_stop_word_come_with_theirs(
    site: Site,  # noqa: F811
    engine: TorchEngine,
) -> None:
    """Also the first one, which prefill computed and decode releases; and where the word comes,
    what it begins in is cut."""
    tokenizer, ids = Tokenizer.load(DEMO), prompt(2, 90)
    answer = wanted(engine, ids, 12)
    text = tokenizer.decode(answer)
    never_complete = [text[:3] + "\x00", text[5:8] + "\x00", "\x00"]
    client = asked(site, ids, max_tokens=12, stop_words=never_complete)
    assert client.wait() == answer
    client.check(ids)
    stopped = asked(site, ids, max_tokens=12, stop_words=[text[-6:-2]])
    assert len(stopped.wait()) < 12 and stopped.reason == "stop_word"
    stopped.check(ids)
    site.check_idle()


def test_what_the_client_has_is_neither_lost_nor_doubled_by_a_further_attempt(
    site: Site,  # noqa: F811
    engine: TorchEngine,
) -> None:
    ids, client = prompt(3, 130), LogprobsClient()
    site.lose_decode_at(client, 3)
    site.submit(client, ids, max_tokens=60, return_log_probs=True, top_logprobs=2)
    assert client.wait() == wanted(engine, ids, 60)
    assert site.calls.models.count("prefill_0") == 2
    client.check(ids)
    site.check_idle()


def test_who_asks_for_none_gets_empty_ones_where_it_names_them(site: Site) -> None:  # noqa: F811
    client = Client()
    client.outputs = Client.outputs | set(NAMES)
    seen: list[Outputs] = []
    send = client.send
    client.send = lambda outputs, is_final=False: (seen.append(outputs), send(outputs, is_final))  # type: ignore[func-returns-value,method-assign]
    site.submit(client, prompt(1, 10), max_tokens=3)
    client.wait()
    assert all(outputs[name].size == 0 for outputs in seen for name in NAMES)
    site.check_idle()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"return_log_probs": True, "top_logprobs": 21}, "top_logprobs is 21; use 0 to 20"),
        ({"return_log_probs": True, "top_logprobs": -1}, "top_logprobs is -1; use 0 to 20"),
        ({"top_logprobs": 2}, "return_log_probs is not true; send both"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(
    site: Site,  # noqa: F811
    inputs: dict[str, Any],
    words: str,
) -> None:
    client = site.ask([1, 2], **inputs)
    with pytest.raises(AssertionError):
        client.wait()
    assert isinstance(client.error, InvalidRequest) and words in str(client.error)
    site.check_idle()


def test_generation_without_a_server_is_the_same(engine: TorchEngine) -> None:
    ids = prompt(1, 40)
    plain, asking = SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, top_logprobs=2)
    assert generate(engine, [ids], plain) == generate(engine, [ids], asking)


class PromptClient(Client):
    outputs = Client.outputs.union(PROMPT_OUTPUTS)

    def __init__(self) -> None:
        super().__init__()
        self.of_prompt: list[Outputs] = []

    def send(self, outputs: Outputs, is_final: bool = False) -> None:
        self.of_prompt.append({name: outputs[name] for name in PROMPT_OUTPUTS})
        super().send(outputs, is_final)

    def check(self, prompt_ids: list[int], top: int) -> None:
        """Compare with transformers. Only the first response has logprobs of the prompt."""
        first, *others = self.of_prompt
        assert all(each[name].size == 0 for each in others for name in PROMPT_OUTPUTS)
        with torch.inference_mode():
            logits = load_reference(DEMO)(torch.tensor([prompt_ids])).logits[0]
        theirs = torch.log_softmax(logits[:-1].float(), -1).numpy()
        own = theirs[np.arange(len(prompt_ids) - 1), prompt_ids[1:]]
        assert first["prompt_ids"].tolist() == prompt_ids
        np.testing.assert_allclose(first["prompt_log_probs"], [0, *own], atol=1e-3)
        assert first["prompt_ranks"].shape == (len(prompt_ids),) and first["prompt_ranks"][0] == 0
        best = np.take_along_axis(theirs, first["prompt_top_token_ids"][1:].astype(int), axis=1)
        assert best.shape == (len(own), top)
        np.testing.assert_allclose(first["prompt_top_log_probs"][1:], best, atol=1e-3)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_the_first_response_has_the_logprobs_of_the_prompt(
    site: Site,  # noqa: F811
    engine: TorchEngine,
    is_stream: bool,
    max_tokens: int,
) -> None:
    ids = prompt(5, 140)
    for top in (3, 0):
        client = PromptClient()
        site.submit(client, ids, max_tokens=max_tokens, stream=is_stream, prompt_logprobs=top)
        assert client.wait() == wanted(engine, ids, max_tokens)
        client.check(ids, top)
    site.check_idle()


def test_a_first_token_that_is_held_back_delays_the_logprobs_of_the_prompt(
    site: Site,  # noqa: F811
    engine: TorchEngine,
) -> None:
    tokenizer, ids, client = Tokenizer.load(DEMO), prompt(2, 90), PromptClient()
    answer = wanted(engine, ids, 6)
    words = [tokenizer.decode(answer[:2]) + "\x00"]
    site.submit(client, ids, max_tokens=6, stop_words=words, prompt_logprobs=2)
    assert client.wait() == answer
    client.check(ids, 2)
    site.check_idle()


@pytest.mark.parametrize("lost_at", ["decode", "stream"])
def test_a_further_attempt_sends_the_logprobs_of_the_prompt_once(
    site: Site,  # noqa: F811
    engine: TorchEngine,
    lost_at: str,
) -> None:
    ids, client = prompt(3, 130), PromptClient()
    refused: list[str] = []

    def refuse(model: str) -> None:
        if model == "decode_0" and not refused:
            refused.append(model)
            raise WorkerUnavailable("decode_0: internal_error: ValueError: x")

    if lost_at == "decode":
        site.calls.before = refuse
    else:
        site.lose_decode_at(client, 3)
    site.submit(client, ids, max_tokens=60, prompt_logprobs=2)
    assert client.wait() == wanted(engine, ids, 60)
    assert site.calls.models.count("prefill_0") == 2
    client.check(ids, 2)
    site.check_idle()


@pytest.mark.parametrize("count", [-1, 21])
def test_a_bad_number_of_likeliest_tokens_of_the_prompt_is_refused_by_name(
    site: Site,  # noqa: F811
    count: int,
) -> None:
    client = site.ask([1, 2], prompt_logprobs=count)
    with pytest.raises(AssertionError):
        client.wait()
    assert f"prompt_logprobs is {count}; use 0 to 20" in str(client.error)
    site.check_idle()


def test_responses_without_logprobs_of_the_prompt_have_none(site: Site) -> None:  # noqa: F811
    client = PromptClient()
    site.submit(client, prompt(1, 10), max_tokens=3)
    client.wait()
    first, *others = client.of_prompt
    assert first["prompt_ids"].tolist() == prompt(1, 10), "named, so it is sent"
    assert all(first[name].size == 0 for name in PROMPT_OUTPUTS[1:])
    assert all(each[name].size == 0 for each in others for name in PROMPT_OUTPUTS)
    site.check_idle()
