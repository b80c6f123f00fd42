"""The workloads that are made of text: a user's next request. Pure and repeatable.

`next()` returns a user's request until `answered()` or `gave_up()` reports its result. The rng is
seeded by the seed, the workload and the user's name alone, so a run can be repeated.

* chat: a conversation. Each prompt contains all of it so far, so the prefix grows turn by turn.
* shared: one long system prompt, the same for every user, and each time another question.
* document: some questions about one long document, then another document.
* decode: short questions, each with a long answer of exactly `decode_tokens`.
* burst: short prompts that share nothing; users.py sends many of them at once.

A rejected request is repeated after `retry_after_s`, but at the latest after RETRY_AFTER_S_MAX. If
`retry_after_s` is 0, which means never, the user sends a new request, as after a failure.

Not here: replaying a trace (trace_share.py), sending (run.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from loadtest.client.answer import ReceivedAnswer
from loadtest.client.protocol import GenerateRequest
from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord
from loadtest.users.settings import Sizes
from loadtest.users.text import Author, ServerFacts

RETRY_AFTER_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, and the greatest length of its answer."""

    prompt: str
    max_tokens: int
    prompt_tokens: int  # an estimate, until the server has counted
    is_exact: bool = False  # the answer has exactly max_tokens
    # the conversation so far, which the prompt contains as text
    messages: tuple[Mapping[str, str], ...] = ()

    def to_send(self, request_id: str, return_decision: bool = False) -> GenerateRequest:
        return GenerateRequest(
            request_id,
            text_input=self.prompt,
            messages=self.messages,
            max_tokens=self.max_tokens,
            min_tokens=self.max_tokens if self.is_exact else None,
            end_id=-1 if self.is_exact else None,
            return_decision=return_decision or None,
        )


def author_of(seed: int, workload: str, user: str) -> Author:
    return Author(random.Random(f"{seed}/{workload}/{user}"))


class TextWorkload:
    """One user's requests; each workload makes the next one in `_make`."""

    name: ClassVar[str]

    def __init__(self, seed: int, user: str, sizes: Sizes, facts: ServerFacts) -> None:
        self._author = author_of(seed, self.name, user)
        self._sizes = sizes
        self._facts = facts
        self._ask: Ask | None = None

    def next(self) -> Ask:
        if self._ask is None:
            self._ask = self._make()
        return self._ask

    def answered(self, answer: ReceivedAnswer) -> None:
        self._ask = None

    def gave_up(self) -> None:
        self._ask = None

    def _make(self) -> Ask:
        raise NotImplementedError

    def _question_after(self, begin: str) -> Ask:
        question = self._author.question(self._facts.characters(self._sizes.question_tokens))
        prompt = f"{begin}Question: {question}\nAnswer:"
        return Ask(prompt, self._sizes.answer_tokens, self._facts.tokens(prompt))


class Conversation(TextWorkload):
    """A conversation of at most `chat_turns` turns that fits the context; then a new one."""

    name = "chat"

    def __init__(self, seed: int, user: str, sizes: Sizes, facts: ServerFacts) -> None:
        super().__init__(seed, user, sizes, facts)
        self.gave_up()

    def answered(self, answer: ReceivedAnswer) -> None:
        assert self._ask is not None
        self._messages = (*self._ask.messages, {"role": "assistant", "content": answer.text})
        self._text = f"{self._ask.prompt}{answer.text}\n"
        self._counted_tokens = answer.input_tokens or 0
        self._uncounted = f"{answer.text}\n" if answer.input_tokens else self._text
        self._turns += 1
        self._ask = None

    def gave_up(self) -> None:
        self._text = ""  # text of all finished turns
        self._messages: tuple[Mapping[str, str], ...] = ()  # the same as messages
        self._counted_tokens = 0  # tokens of it that the server has counted
        self._uncounted = ""  # text that the server has not counted yet
        self._turns = 0
        self._ask = None

    def _make(self) -> Ask:
        if self._turns >= self._sizes.chat_turns:
            self.gave_up()
        question, turn = self._turn()
        if self._turns and not self._fits(turn):
            self.gave_up()
            question, turn = self._turn()
        tokens = self._counted_tokens + self._facts.tokens(self._uncounted + turn)
        messages = (*self._messages, {"role": "user", "content": question})
        return Ask(self._text + turn, self._sizes.answer_tokens, tokens, messages=messages)

    def _turn(self) -> tuple[str, str]:
        """The question, and its text in the prompt."""
        question = self._author.question(self._facts.characters(self._sizes.question_tokens))
        return question, f"User: {question}\nAssistant:"

    def _fits(self, turn: str) -> bool:
        return self._facts.fits(
            self._counted_tokens, self._uncounted + turn, self._sizes.answer_tokens
        )


class SharedPrompt(TextWorkload):
    name = "shared"

    def __init__(self, seed: int, user: str, sizes: Sizes, facts: ServerFacts) -> None:
        super().__init__(seed, user, sizes, facts)
        system = author_of(seed, self.name, "system").prose(facts.characters(sizes.system_tokens))
        self._begin = f"{system}\n\n"

    def _make(self) -> Ask:
        return self._question_after(self._begin)


class QuestionedDocument(TextWorkload):
    """`document_questions` questions about a document, then another document."""

    name = "document"

    def __init__(self, seed: int, user: str, sizes: Sizes, facts: ServerFacts) -> None:
        super().__init__(seed, user, sizes, facts)
        self.gave_up()

    def answered(self, answer: ReceivedAnswer) -> None:
        super().answered(answer)
        self._questions_left -= 1

    def gave_up(self) -> None:
        super().gave_up()
        self._document = ""
        self._questions_left = 0

    def _make(self) -> Ask:
        if self._questions_left == 0:
            length = self._facts.characters(self._sizes.document_tokens)
            self._document = f"{self._author.prose(length)}\n\n"
            self._questions_left = self._sizes.document_questions
        return self._question_after(self._document)


class BurstQuestions(TextWorkload):
    """Short prompts that share nothing. Several are in flight at once, so none is repeated."""

    name = "burst"

    def next(self) -> Ask:
        return self._question_after("")


class LongAnswers(TextWorkload):
    """Little to prefill, much to decode."""

    name = "decode"

    def _make(self) -> Ask:
        asked = self._question_after("")
        return replace(asked, max_tokens=self._sizes.decode_tokens, is_exact=True)


TEXT_WORKLOADS: dict[str, type[TextWorkload]] = {
    workload.name: workload
    for workload in (Conversation, SharedPrompt, QuestionedDocument, BurstQuestions, LongAnswers)
}


def too_long(name: str, sizes: Sizes, facts: ServerFacts) -> str | None:
    """Why a new user's first prompt would not fit the context; None when it does."""
    ask = TEXT_WORKLOADS[name](0, "fitting", sizes, facts).next()
    if facts.fits(0, ask.prompt, ask.max_tokens):
        return None
    return (
        f"{name}: a prompt of about {ask.prompt_tokens:,} tokens and an answer of "
        f"{ask.max_tokens:,} may not fit the server's context of "
        f"{facts.context_tokens_max:,} tokens; ask for less"
    )


def burst_due_s(now_s: float, every_s: float) -> float:
    """The next common moment, on a clock that all users share."""
    return (now_s // every_s + 1) * every_s


@dataclass(frozen=True, slots=True)
class NextStep:
    wait_s: float
    is_answered: bool = False
    is_repeated: bool = False  # the same request; otherwise a new one


def next_step(record: RequestRecord, think_s: float) -> NextStep:
    if record.outcome == COMPLETED:
        return NextStep(think_s, is_answered=True)
    if (wait_s := retry_s(record)) > 0:
        return NextStep(wait_s, is_repeated=True)
    return NextStep(think_s)


def retry_s(record: RequestRecord) -> float:
    """Pause of a rejected client; 0 for all others."""
    if record.outcome != REJECTED:
        return 0.0
    return min(record.retry_after_s or 0.0, RETRY_AFTER_S_MAX)
