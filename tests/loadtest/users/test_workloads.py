"""What users ask: prefixes that grow or are shared, prompts that fit, runs that repeat."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from loadtest.client.answer import ReceivedAnswer
from loadtest.users.settings import Sizes
from loadtest.users.text import ServerFacts
from loadtest.users.workloads import TEXT_WORKLOADS, Ask, burst_due_s, too_long

FACTS = ServerFacts(64, 8_192, 2_048, (), bytes_per_token=3.0)
SIZES = Sizes()


def tokens_of(text: str) -> int:
    """The server's count here: a little more than the client expects."""
    return int(len(text.encode()) / 3.0 * 1.15) + 1


def common(texts: list[str]) -> str:
    """What all of them begin with."""
    first, last = min(texts), max(texts)
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(character for character, _ in alike)


def answer(ask: Ask, text: str = " the quiet garden\n") -> ReceivedAnswer:
    made = ReceivedAnswer(output_ids=[1] * ask.max_tokens, texts=[text])
    made.input_tokens = tokens_of(ask.prompt)
    return made


def turns(
    name: str,
    count: int,
    user: str = "1",
    seed: int = 0,
    sizes: Sizes = SIZES,
    facts: ServerFacts = FACTS,
    reply: str = " the quiet garden\n",
) -> list[Ask]:
    workload = TEXT_WORKLOADS[name](seed, user, sizes, facts)
    asked = []
    for _ in range(count):
        asked.append(workload.next())
        workload.answered(answer(asked[-1], reply))
    return asked


def test_a_conversation_grows_by_answer_and_question() -> None:
    asked = turns("chat", SIZES.chat_turns)
    for before, now in itertools.pairwise(asked):
        assert now.prompt.startswith(before.prompt + " the quiet garden\n")
        assert len(now.prompt) > len(before.prompt) + len(" the quiet garden\n")
    assert all(ask.prompt.endswith("Assistant:") for ask in asked)


def test_after_its_last_turn_a_conversation_begins_anew() -> None:
    asked = turns("chat", 2 * SIZES.chat_turns)
    first, second = asked[0], asked[SIZES.chat_turns]
    assert common([first.prompt, second.prompt]).count(" ") < 8
    assert len(second.prompt) < 2 * len(first.prompt)


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_no_prompt_exceeds_the_context(name: str, seed: int) -> None:
    sizes = dataclasses.replace(SIZES, chat_turns=10_000, answer_tokens=200, question_tokens=100)
    facts = with_context(4_600)
    reply = "word and word again " * 10  # about 70 tokens, more than one would think of 200 ids
    asked = turns(name, 60, seed=seed, sizes=sizes, facts=facts, reply=reply)
    assert too_long(name, sizes, facts) is None
    assert max(tokens_of(ask.prompt) + ask.max_tokens for ask in asked) <= 4_600


def test_a_long_conversation_uses_most_of_the_context() -> None:
    sizes = dataclasses.replace(SIZES, chat_turns=10_000)
    facts = with_context(2_000)
    longest = max(tokens_of(ask.prompt) for ask in turns("chat", 60, sizes=sizes, facts=facts))
    assert longest > 1_600


def with_context(context_tokens_max: int) -> ServerFacts:
    return dataclasses.replace(FACTS, context_tokens_max=context_tokens_max)


def test_what_cannot_fit_is_said_before_the_run() -> None:
    sizes = dataclasses.replace(SIZES, document_tokens=9_000)
    assert "may not fit" in (too_long("document", sizes, FACTS) or "")
    assert too_long("chat", sizes, FACTS) is None


def test_all_users_share_the_system_prompt_and_ask_different_things() -> None:
    one, other = turns("shared", 3, user="1"), turns("shared", 3, user="2")
    begin = common([ask.prompt for ask in one + other])
    assert FACTS.tokens(begin) >= SIZES.system_tokens
    assert len({ask.prompt for ask in one + other}) == 6


def test_questions_are_about_one_document_until_the_next() -> None:
    count = SIZES.document_questions
    asked = [ask.prompt for ask in turns("document", 2 * count)]
    for document in (asked[:count], asked[count:]):
        assert FACTS.tokens(common(document)) >= SIZES.document_tokens
        assert len(set(document)) == count
    assert FACTS.tokens(common([asked[0], asked[count]])) < 64


def test_prompts_of_a_burst_share_nothing_to_speak_of() -> None:
    asked = [ask.prompt for ask in turns("burst", 50)]
    assert len(set(asked)) == 50
    assert FACTS.tokens(common(asked)) < 64


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_the_same_seed_and_user_ask_the_same_and_others_do_not(name: str) -> None:
    assert turns(name, 6) == turns(name, 6)
    assert turns(name, 6) != turns(name, 6, user="2")
    assert turns(name, 6) != turns(name, 6, seed=1)


@pytest.mark.parametrize("name", ["chat", "shared", "document"])
def test_asked_again_without_an_answer_a_user_repeats_itself(name: str) -> None:
    workload = TEXT_WORKLOADS[name](0, "1", SIZES, FACTS)
    rejected = workload.next()
    assert workload.next() == rejected
    workload.gave_up()
    assert workload.next() != rejected


def test_lengths_are_about_what_was_asked_for() -> None:
    asked = SIZES.question_tokens
    assert turns("document", 1)[0].prompt_tokens == pytest.approx(
        SIZES.document_tokens + asked, rel=0.05
    )
    assert turns("shared", 1)[0].prompt_tokens == pytest.approx(
        SIZES.system_tokens + asked, rel=0.1
    )


def test_bursts_are_at_common_moments() -> None:
    assert [burst_due_s(now_s, 10.0) for now_s in (0.0, 3.2, 9.99, 10.0)] == [10, 10, 10, 20]


def test_a_conversation_as_messages_says_the_same_turn_by_turn() -> None:
    asked = turns("chat", 3)
    for number, ask in enumerate(asked):
        assert [one["role"] for one in ask.messages] == ["user", "assistant"] * number + ["user"]
        assert all(one["content"] in ask.prompt for one in ask.messages)
    assert asked[2].messages[:3] == (*asked[1].messages[:2], asked[1].messages[2])
    anew = turns("chat", SIZES.chat_turns + 1)[-1]
    assert len(anew.messages) == 1


def test_a_decode_bound_chat_asks_little_and_gets_long_answers_of_one_length() -> None:
    asked = turns("decode", 3)
    assert all(ask.prompt_tokens < 128 < ask.max_tokens == SIZES.decode_tokens for ask in asked)
    sent = asked[0].to_send("r")
    assert (sent.min_tokens, sent.max_tokens, sent.end_id) == (512, 512, -1)
    assert turns("burst", 1)[0].to_send("r").min_tokens is None
