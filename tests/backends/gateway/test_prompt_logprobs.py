"""`echo`, `prompt_logprobs` and `max_tokens` 0, as clients of OpenAI's interface see them."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from backends.gateway.answer.logprobs import LEAST, LogprobsWriter, PieceLogprobs, PromptWriter
from backends.gateway.answer.pieces import AnswerPiece
from backends.gateway.frontend_calls import with_prompt
from backends.gateway.request.fields import CHAT, COMPLETION
from backends.gateway.request.infer_request import PromptUse
from backends.gateway.tokenizing import ServedWords
from backends.text.tokenizer import Tokenizer
from bench.harness.replayed_frontend import LOG_PROB, PROMPT_LOG_PROB, PROMPT_RANK
from tests.backends.gateway.rig import Rig, run
from tests.backends.small_tokenizers import DEMO

TOKENIZER = Tokenizer.load(DEMO)
TEXT = "It is a truth"
IDS = TOKENIZER.encode(TEXT)


def names(ids: list[int]) -> list[str]:
    return [TOKENIZER.decode([each], skip_special=False) for each in ids]


@pytest.mark.parametrize("prompt", [TEXT, IDS, [IDS]])
def test_an_echo_without_logprobs_is_the_text_alone(prompt: Any) -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.post(COMPLETION, prompt=prompt, echo=True, max_tokens=2)
        [choice] = answer.json["choices"]
        assert choice["text"] == f"{TEXT} word word" and choice["logprobs"] is None
        assert choice["finish_reason"] == "length"
        assert answer.json["usage"]["completion_tokens"] == 2
        [sent] = rig.frontend.requests
        assert not [each.name for each in sent.outputs if each.name.startswith("prompt_")]

    run(check)


def test_an_echo_with_logprobs_begins_with_the_prompts_tokens() -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.post(COMPLETION, prompt=IDS, echo=True, logprobs=2, max_tokens=1)
        [choice] = answer.json["choices"]
        found, scored = choice["logprobs"], len(IDS) - 1
        assert choice["text"] == f"{TEXT} word"
        assert found["tokens"][:-1] == names(IDS)
        assert found["token_logprobs"] == [None, *[PROMPT_LOG_PROB] * scored, LOG_PROB]
        best = dict.fromkeys(names([1, 2]), LOG_PROB)
        own = [{name: PROMPT_LOG_PROB, **best} for name in names(IDS)[1:]]
        assert found["top_logprobs"][:-1] == [None, *own], "the token itself, as in vLLM"
        offsets = found["text_offset"]
        assert [TEXT[a:b] for a, b in itertools.pairwise(offsets)] == names(IDS)
        assert offsets[-1] == len(TEXT)

    run(check)


def test_a_stream_has_the_echo_in_its_first_event() -> None:
    async def check(rig: Rig) -> None:
        asked = {"prompt": IDS, "echo": True, "logprobs": 0, "max_tokens": 3, "stream": True}
        *chunks, done = (await rig.post(COMPLETION, **asked)).events
        assert done == "[DONE]"
        texts = [each["choices"][0]["text"] for each in chunks]
        assert texts == [f"{TEXT} word", " word", " word"]
        parts = [each["choices"][0]["logprobs"] for each in chunks]
        assert [len(each["tokens"]) for each in parts] == [len(IDS) + 1, 1, 1]
        assert parts[0]["token_logprobs"][:2] == [None, PROMPT_LOG_PROB]
        assert parts[0]["top_logprobs"][:2] == [None, {names(IDS)[1]: PROMPT_LOG_PROB}]
        offsets = [offset for each in parts for offset in each["text_offset"]]
        assert offsets == sorted(offsets) and offsets[len(IDS)] == len(TEXT)

    run(check)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_no_tokens_are_generated_with_max_tokens_0(echo: bool, is_stream: bool) -> None:
    async def check(rig: Rig) -> None:
        asked: dict[str, Any] = {"prompt": IDS, "max_tokens": 0, "logprobs": 1, "echo": echo}
        if not is_stream:
            answer = (await rig.post(COMPLETION, **asked)).json
            usage = answer["usage"]
        else:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            answer, counted, done = (await rig.post(COMPLETION, **asked)).events
            usage = counted["usage"]
            assert done == "[DONE]"
        [choice] = answer["choices"]
        assert choice["text"] == (TEXT if echo else "")
        assert choice["finish_reason"] == "length" and usage["completion_tokens"] == 0
        expected = [None, *[PROMPT_LOG_PROB] * (len(IDS) - 1)] if echo else []
        assert choice["logprobs"]["token_logprobs"] == expected

    run(check)


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_prompt_logprobs_have_vllms_shape(route: str) -> None:
    async def check(rig: Rig) -> None:
        said = {"prompt": IDS} if route == COMPLETION else {}
        answer = (await rig.post(route, prompt_logprobs=2, max_tokens=1, **said)).json
        holder, other = answer, answer["choices"][0]
        if route == COMPLETION:
            holder, other = other, holder
        assert "prompt_logprobs" not in other
        first, second, *rest = holder["prompt_logprobs"]
        assert first is None
        best = {
            str(token_id): {
                "logprob": LOG_PROB,
                "rank": rank,
                "decoded_token": TOKENIZER.decode([token_id], skip_special=False),
            }
            for rank, token_id in enumerate((1, 2), 1)
        }
        if route == COMPLETION:
            assert len(rest) == len(IDS) - 2
            own = {"logprob": PROMPT_LOG_PROB, "rank": PROMPT_RANK, "decoded_token": names(IDS)[1]}
            assert second == {str(IDS[1]): own, **best}
            assert next(iter(second)) == str(IDS[1]), "as in vLLM, the prompt's token is first"
        assert answer["choices"][0]["logprobs"] is None
        plain = (await rig.post(route, max_tokens=1, **said)).json
        assert "prompt_logprobs" not in plain and "prompt_logprobs" not in plain["choices"][0]

    run(check)


def test_echo_and_prompt_logprobs_have_their_own_number_of_likeliest_tokens() -> None:
    async def check(rig: Rig) -> None:
        for logprobs, top in ((1, 3), (3, 1), (0, 2)):
            asked = {"echo": True, "logprobs": logprobs, "prompt_logprobs": top, "max_tokens": 1}
            [choice] = (await rig.post(COMPLETION, prompt=IDS, **asked)).json["choices"]
            assert len(choice["logprobs"]["top_logprobs"][1]) == logprobs + 1
            assert len(choice["prompt_logprobs"][1]) == top + 1

    run(check)


def writer(text: str, ids: list[int], scored: LogprobsWriter | None, **use: Any) -> PromptWriter:
    wanted = PromptUse(
        **{"is_echoed": True, "is_alone": False, "top": None, "echoed_top": 0, **use}
    )
    return PromptWriter(wanted, {"text_input": text}, ServedWords(TOKENIZER), scored)


def test_a_special_token_that_the_tokenizer_added_is_not_in_the_text() -> None:
    special = next(each for each in range(20) if not TOKENIZER.decode([each]))
    ids = [special, *IDS]
    scored = LogprobsWriter(COMPLETION, ServedWords(TOKENIZER))
    prompt = PieceLogprobs(ids, [-1.0] * len(ids), [[] for _ in ids], [[] for _ in ids])
    assert writer(TEXT, ids, scored).begin(prompt, [1] * len(ids)) == (TEXT.encode(), b"")
    found = scored.add(PieceLogprobs([IDS[0]], [-1.0], [[]], [[]]))
    assert found["token_logprobs"][:2] == [None, -1.0]
    assert found["text_offset"][:2] == [0, 0] and found["text_offset"][-1] == len(TEXT)


def test_a_prompt_of_one_token_has_only_null() -> None:
    scored = LogprobsWriter(COMPLETION, ServedWords(TOKENIZER))
    prompt = PieceLogprobs(IDS[:1], [0.0], [[]], [[]])
    assert writer(TEXT, IDS[:1], scored, top=3).begin(prompt, [0])[1] == b"[null]"
    assert scored.add(PieceLogprobs([], [], [], []))["token_logprobs"] == [None]


def test_an_impossible_token_has_openais_least_logprob() -> None:
    prompt = PieceLogprobs(IDS[:2], [0.0, -math.inf], [[7], [7]], [[0.0], [-0.5]])
    _, listed = writer(TEXT, IDS, None, top=1).begin(prompt, [0, 9])
    assert json.loads(listed)[1][str(IDS[1])]["logprob"] == LEAST


def test_only_the_first_piece_has_the_prompt() -> None:
    made, empty = writer(TEXT, IDS, None), service_pb2.ModelInferResponse()
    pieces = [with_prompt(AnswerPiece(b" x", reason), made, empty) for reason in ("", "length")]
    assert [each.text for each in pieces] == [f"{TEXT} x".encode(), b" x"]
