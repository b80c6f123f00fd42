"""Prompts as text, of about as many tokens as asked, that no server has seen.

Random tokens written out: read again as text they are some 15 % more. Not here: prompts as tokens
and traces (workloads.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from tokenizers import Tokenizer

from loadtest.clients.load import Load
from loadtest.replay.prompts import TokenSource

SPECIAL_TOKEN_IDS = range(16)  # the demo's are 0, 1 and 2


def fresh_texts(load: Load) -> Iterator[str]:
    """`load.requests` of them."""
    tokenizer = Tokenizer.from_file(str(load.tokenizer / "tokenizer.json"))
    seed = secrets.randbits(62)
    source = TokenSource(tokenizer.get_vocab_size(), SPECIAL_TOKEN_IDS, seed)
    for index in range(load.requests):
        yield tokenizer.decode(source.fresh(index, load.input_tokens).tolist())
