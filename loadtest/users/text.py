"""English-looking text from a seeded list of words, and its number of tokens on a server.

A load needs unique text of known length; its sense does not matter. The words and sentence patterns
are this file's own. Pure: the random generator is an argument.

The server counts tokens. Bytes per token are measured once with a sample of the same kind of text,
so the token count of a later prompt may be up to `ESTIMATE_SLACK` times too low.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from loadtest.client.server import ServerDescription

ESTIMATE_SLACK = 1.2


def _parts(separator: str, text: str) -> tuple[str, ...]:
    return tuple(text.split(separator))


NOUNS = _parts(
    " ",
    "garden letter carriage morning evening window river village sister brother captain doctor "
    "journey fortune winter summer neighbour visitor servant market harbour island library "
    "question answer promise secret portrait fireplace orchard meadow church bridge tower engine "
    "telegram newspaper lantern kitchen staircase parlour musician painter merchant soldier "
    "teacher stranger cousin daughter student valley forest storm silence dinner concert dance "
    "quarrel friendship kindness courage patience curiosity memory",
)
ADJECTIVES = _parts(
    " ",
    "quiet small little bright sudden gentle proud weary cheerful distant narrow broken golden "
    "curious careful polite foolish clever handsome plain solemn merry bitter tender hidden "
    "crowded timeless modern peculiar familiar lonely generous silver heavy pleasant",
)
VERBS = _parts(
    " ",
    "remembered followed described admired forgot discovered crossed visited questioned praised "
    "avoided expected repaired painted carried mentioned observed returned promised refused "
    "welcomed surprised examined desired defended explained noticed ignored purchased guarded",
)
PLACES = _parts(
    "|",
    "in the village|by the river|near the old bridge|on the road to town|behind the church|under "
    "the great oak|at the edge of the forest|in a corner of the library|on board the ship|at the "
    "top of the hill",
)
TIMES = _parts(
    "|",
    "at once|before breakfast|after the rain|in the end|for the last time|by candlelight|every "
    "Sunday|long ago|that same night|in the first week of spring",
)
QUESTIONS = _parts(
    "|",
    "What did the {a} {n} think of the {m}?|Why was the {n} so {a} {p}?|Who {v} the {m} {t}?|"
    "Tell me more about the {a} {n} and the {m}.|How did the {n} come to be {p}?|"
    "What would have happened if nobody had {v} the {m}?",
)
SENTENCES = _parts(
    "|",
    "The {a} {n} {v} the {m} {p}.|{T}, the {n} {v} a {a} {m}.|Nobody {p} {v} the {n}, although "
    "the {m} was {a}.|It was a {a} {n}, and the {m} {v} it {t}.|When the {n} {v} the {a} {m}, "
    "everyone {p} was silent.|The {m} of the {n} was as {a} as ever {t}.",
)


class Author:
    """Writes text; an rng in the same state gives the same text."""

    def __init__(self, rng: random.Random) -> None:
        self._chance = rng

    def question(self, characters: int) -> str:
        """A question of about this length; sentences before it fill up a long one."""
        asked = self._fill(QUESTIONS)
        return f"{self.prose(characters - len(asked))} {asked}".strip()

    def prose(self, characters: int) -> str:
        """Sentences of at least this length together, and less than one sentence longer."""
        found: list[str] = []
        while characters > 0:
            found.append(self._fill(SENTENCES))
            characters -= len(found[-1]) + 1
        return " ".join(found)

    def _fill(self, patterns: tuple[str, ...]) -> str:
        pick = self._chance.choice
        time = pick(TIMES)
        return pick(patterns).format(
            a=pick(ADJECTIVES),
            n=pick(NOUNS),
            m=pick(NOUNS),
            v=pick(VERBS),
            p=pick(PLACES),
            t=time,
            T=time[0].upper() + time[1:],
        )


@dataclass(frozen=True, slots=True)
class ServerFacts(ServerDescription):
    """The server's properties that users need; a master sends them to its workers."""

    bytes_per_token: float = 3.0
    model: str = "conductor"  # name of the requested model

    def characters(self, tokens: int) -> int:
        """Length of a text of about this many tokens; our texts are ASCII."""
        return max(1, round(tokens * self.bytes_per_token))

    def tokens(self, text: str) -> int:
        return math.ceil(len(text.encode()) / self.bytes_per_token)

    def fits(self, counted_tokens: int, text: str, max_tokens: int) -> bool:
        """Whether a prompt of `counted_tokens` and `text` leaves room for the answer."""
        prompt_tokens = counted_tokens + math.ceil(self.tokens(text) * ESTIMATE_SLACK)
        return prompt_tokens + max_tokens <= self.context_tokens_max
