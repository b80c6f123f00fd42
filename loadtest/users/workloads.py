"""What a user asks next: the workloads that are made of text. Pure and repeatable.

Each user has its own; `next()` says what to send, then `answered()` or `gave_up()` what came of it.
Asked again without either, as after a rejection, `next()` repeats itself. Chance comes from the
seed, the workload and the user's name alone, so a run can be repeated.

* chat: a conversation. Each prompt is the whole of it so far, so the prefix grows turn by turn.
* shared: one long system prompt, the same for every user, and each time another question.
* document: some questions about one long document, then another document.
* burst: short prompts that share nothing; that many come at once is users.py's doing.

Not here: replaying a trace (trace_share.py), sending (sending.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from loadtest.client.answer import StreamedAnswer
from loadtest.users.server_facts import ServerFacts
from loadtest.users.settings import Sizes
from loadtest.users.text import Author


@dataclass(frozen=True, slots=True)
class Ask:
    """What to send: a prompt, and how long the answer may be."""

    prompt: str
    max_tokens: int
    prompt_tokens: int  # an estimate, until the server has counted


class Workload(Protocol):
    def next(self) -> Ask: ...
    def answered(self, answer: StreamedAnswer) -> None: ...
    def gave_up(self) -> None: ...


def author_of(seed: int, workload: str, user: str) -> Author:
    return Author(random.Random(f"{seed}/{workload}/{user}"))


class Chat:
    """A conversation of at most `chat_turns` turns that fits the context; then a new one."""

    def __init__(self, seed: int, user: str, sizes: Sizes, facts: ServerFacts) -> None:
        self._author = author_of(seed, "chat", user)
        self._sizes = sizes
        self._facts = facts
        self._begin()

    def _begin(self) -> None:
        self._text = ""  # all turns that are over
        self._counted_tokens = 0  # what of it the server has counted
        self._uncounted = ""  # and what not
        self._turns = 0
        self._ask: Ask | None = None

    def next(self) -> Ask:
        if self._ask is None:
            if self._turns >= self._sizes.chat_turns:
                self._begin()
            turn = self._turn()
            if self._turns and not self._fits(turn):
                self._begin()
                turn = self._turn()
            tokens = self._counted_tokens + self._facts.tokens(self._uncounted + turn)
            self._ask = Ask(self._text + turn, self._sizes.answer_tokens, tokens)
        return self._ask

    def answered(self, answer: StreamedAnswer) -> None:
        assert self._ask is not None
        asked, self._ask = self._ask, None
        self._text = f"{asked.prompt}{answer.text}\n"
        self._counted_tokens = answer.input_tokens or 0
        self._uncounted = f"{answer.text}\n" if answer.input_tokens else self._text
        self._turns += 1

    def gave_up(self) -> None:
        self._begin()

    def _turn(self) -> str:
        question = self._author.question(self._facts.characters(self._sizes.question_tokens))
        return f"User: {question}\nAssistant:"

    def _fits(self, turn: str) -> bool:
        return self._facts.fits(
            self._counted_tokens, self._uncounted + turn, self._sizes.answer_tokens
        )


class SharedPrompt:
    """One system prompt for all users of a seed, each time with another question."""

    def __init__(self, seed: int, user: str, sizes: Sizes, facts: ServerFacts) -> None:
        system = author_of(seed, "shared", "system").prose(facts.characters(sizes.system_tokens))
        self._begin = f"{system}\n\n"
        self._author = author_of(seed, "shared", user)
        self._sizes = sizes
        self._facts = facts
        self._ask: Ask | None = None

    def next(self) -> Ask:
        if self._ask is None:
            self._ask = question_after(self._begin, self._author, self._sizes, self._facts)
        return self._ask

    def answered(self, answer: StreamedAnswer) -> None:
        self._ask = None

    def gave_up(self) -> None:
        self._ask = None


class Document:
    """`document_questions` questions about a document, then another document."""

    def __init__(self, seed: int, user: str, sizes: Sizes, facts: ServerFacts) -> None:
        self._author = author_of(seed, "document", user)
        self._sizes = sizes
        self._facts = facts
        self.gave_up()

    def next(self) -> Ask:
        if self._ask is None:
            if self._questions_left == 0:
                length = self._facts.characters(self._sizes.document_tokens)
                self._document = f"{self._author.prose(length)}\n\n"
                self._questions_left = self._sizes.document_questions
            self._ask = question_after(self._document, self._author, self._sizes, self._facts)
        return self._ask

    def answered(self, answer: StreamedAnswer) -> None:
        self._ask = None
        self._questions_left -= 1

    def gave_up(self) -> None:
        self._ask: Ask | None = None
        self._document = ""
        self._questions_left = 0


class Questions:
    """Short prompts that share nothing."""

    def __init__(self, seed: int, user: str, sizes: Sizes, facts: ServerFacts) -> None:
        self._author = author_of(seed, "burst", user)
        self._sizes = sizes
        self._facts = facts

    def next(self) -> Ask:
        return question_after("", self._author, self._sizes, self._facts)

    def answered(self, answer: StreamedAnswer) -> None:
        pass

    def gave_up(self) -> None:
        pass


def question_after(begin: str, author: Author, sizes: Sizes, facts: ServerFacts) -> Ask:
    question = author.question(facts.characters(sizes.question_tokens))
    prompt = f"{begin}Question: {question}\nAnswer:"
    return Ask(prompt, sizes.answer_tokens, facts.tokens(prompt))


TEXT_WORKLOADS = {
    "chat": Chat,
    "shared": SharedPrompt,
    "document": Document,
    "burst": Questions,
}


def too_long(name: str, sizes: Sizes, facts: ServerFacts) -> str | None:
    """Why a new user's first prompt would not fit the context; None when it does."""
    ask = TEXT_WORKLOADS[name](0, "fitting", sizes, facts).next()
    if facts.fits(0, ask.prompt, ask.max_tokens):
        return None
    return (
        f"{name}: a prompt of about {ask.prompt_tokens:,} tokens and an answer of "
        f"{ask.max_tokens:,} do not surely fit the server's context of "
        f"{facts.context_tokens_max:,} tokens; ask for less"
    )


def burst_due_s(now_s: float, every_s: float) -> float:
    """The next common moment, on a clock that all users share."""
    return (now_s // every_s + 1) * every_s
