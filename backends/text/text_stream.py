"""Incremental detokenisation: sends whole characters, never revises text, cuts off stop words.

Detokenisation works on bytes. A token adds bytes (token_bytes.py), and stop words are matched in
bytes (`StopWords`). Bytes that may become a stop word are held back together with their tokens, and
all others are *released*. A UTF-8 decoder turns released bytes into characters. The decoder keeps
the bytes of an unfinished character, and turns invalid bytes into U+FFFD. So the text of an
OutputDelta is always the text of its token ids, up to a stop word.

The postprocessing model has no state. It receives an OutputDelta's ids and up to 16 `context_ids`,
the tokens before these ids. `new_text` computes the same text from them, because a token's bytes
depend on no tokens before this context.

Stop words are matched with Aho-Corasick, at a constant cost per byte. Matching bytes finds the same
words as matching characters, because a UTF-8 character never occurs inside another one. The stop
word whose last byte comes first wins. Of several that end at the same byte, the longest wins.

Further rules:

* Special tokens, `end_ids` and ids outside the vocabulary have no text, but are released in order.
  With `shows_special`, a special token that is no end id has its name as text. It is no context of
  the next token.
* The text of a stop word is not sent. If a stop word begins inside a token, the token is released,
  and `cut_bytes` limits the text of the delta.
* A stop word that is complete within the first `min_tokens` tokens is ignored. A stop word that
  begins in these tokens and is complete later ends the output, as in vLLM.
* A stop word never begins in the context (the tokens before the first pushed token).
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from backends.text.token_bytes import CONTEXT_TOKENS, TokenBytes
from backends.text.tokenizer import Tokenizer
from backends.token_logprobs import TokenLogprobs


class StopWords:
    """Aho-Corasick automaton. A state is a prefix of a stop word; state 0 is the empty prefix."""

    def __init__(self, words: Sequence[str]) -> None:
        self._children: list[dict[int, int]] = [{}]  # of each state: next byte -> state
        self._fallback = [0]  # of each state: the longest proper suffix that is a state
        self.depth_bytes = [0]  # of each state: length of its prefix
        self.match_bytes = [0]  # of each state: length of the longest word at its end; 0: none
        for word in words:
            assert word, "the frontend rejects empty stop words"
            self._add(word.encode())
        self._link()

    def step(self, state: int, byte: int) -> int:
        while True:
            following = self._children[state].get(byte)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def _add(self, word: bytes) -> None:
        state = 0
        for byte in word:
            following = self._children[state].get(byte)
            if following is None:
                following = len(self._children)
                self._children[state][byte] = following
                self._children.append({})
                self._fallback.append(0)
                self.depth_bytes.append(self.depth_bytes[state] + 1)
                self.match_bytes.append(0)
            state = following
        self.match_bytes[state] = len(word)

    def _link(self) -> None:
        """Set the fallbacks, breadth first: the fallback of a state is shorter than the state."""
        waiting = deque(self._children[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, child in self._children[state].items():
                self._fallback[child] = self.step(self._fallback[state], byte)
                waiting.append(child)
            if not self.match_bytes[state]:
                self.match_bytes[state] = self.match_bytes[self._fallback[state]]


_automaton_of = lru_cache(maxsize=64)(StopWords)  # clients send the same words with every request
CHARACTER_BYTES_MAX = 4
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Tokens and text that may be sent now."""

    token_ids: Sequence[int]
    text: str  # text of `token_ids`, cut to `cut_bytes`
    cut_bytes: int = -1  # number of UTF-8 bytes to which `new_text` must cut its text; -1: all
    is_stopped: bool = False  # True: a stop word was found, and nothing follows
    context_ids: Sequence[int] = ()  # the last tokens with text before `token_ids`; at most 16
    logprobs: Sequence[TokenLogprobs] = ()  # one for each of token_ids, or empty


def merge(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Join consecutive deltas, for a message with several tokens."""
    assert deltas
    if len(deltas) == 1:
        return deltas[0]
    text = "".join(delta.text for delta in deltas)
    is_cut = any(delta.cut_bytes >= 0 for delta in deltas)
    return OutputDelta(
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text=text,
        cut_bytes=len(text.encode()) if is_cut else -1,
        is_stopped=deltas[-1].is_stopped,
        context_ids=deltas[0].context_ids,
        logprobs=tuple(found for delta in deltas for found in delta.logprobs),
    )


def new_text(
    tokenizer: Tokenizer,
    context_ids: Sequence[int],
    token_ids: Sequence[int],
    is_final: bool,
    cut_bytes: int = -1,
) -> str:
    """The text that `token_ids` add. `is_final`: an unfinished last character becomes U+FFFD."""
    text = TextStream(tokenizer, context_ids).push(token_ids, is_last=is_final).text
    return text if cut_bytes < 0 else text.encode()[:cut_bytes].decode(errors="ignore")


class TextStream:
    """The text of one request. The caller pushes tokens, and sends the returned deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int] = (),
        stop_words: Sequence[str] = (),
        end_ids: Iterable[int] = (),
        min_tokens: int = 0,
        shows_special: bool = False,
    ) -> None:
        self._tokens = tokenizer.token_bytes
        self._special_of = tokenizer if shows_special else None  # decodes special tokens
        self._pushed = _context(self._tokens, context_ids)  # context of the next token to push
        self._released = self._pushed.copy()  # context of the first held token
        self._decoder = _decoder_after(self._tokens, self._pushed)
        self._words = _automaton_of(tuple(stop_words)) if stop_words else None
        self._state = 0
        self._end_ids = frozenset(end_ids)
        self._free_tokens = min_tokens  # no stop word may end in this many next tokens; may be < 0
        self._held: deque[tuple[int, bytes]] = deque()  # (token id, its bytes) not yet released
        self._logprobs: deque[TokenLogprobs] = deque()  # one for each held token, or empty
        self._pushed_bytes = 0  # of all pushed tokens
        self._released_bytes = 0  # of all released tokens; <= _pushed_bytes
        self._stop_at_bytes = -1  # byte position at which the stop word begins; -1: none found
        self._is_finished = False

    @property
    def is_stopped(self) -> bool:
        return self._stop_at_bytes >= 0

    def push(
        self,
        token_ids: Iterable[int],
        is_last: bool = False,
        logprobs: Iterable[TokenLogprobs] = (),
    ) -> OutputDelta:
        """Add tokens and return the delta that may be sent. Tokens after a stop word are ignored.

        `is_last`: release all tokens. `logprobs`: one for each token, or empty.
        """
        assert not self._is_finished, "the stream was finished"
        self._is_finished = is_last
        self._logprobs.extend(logprobs)
        for token_id in token_ids:
            if self.is_stopped:
                break
            self._take(token_id)
        return self._release()

    def finish(self) -> OutputDelta:
        """Release the held tokens; an unfinished character becomes U+FFFD. No push may follow."""
        return self.push((), is_last=True)

    def check(self) -> None:
        """Assert the invariants."""
        held_bytes = sum(len(piece) for _, piece in self._held)
        assert self._released_bytes + held_bytes == self._pushed_bytes
        assert len(self._pushed) <= CONTEXT_TOKENS >= len(self._released)
        if self._words is None:
            assert not self._held, f"{len(self._held)} tokens held without stop words"

    def _take(self, token_id: int) -> None:
        """Append the token's bytes and search for a stop word that ends in them."""
        piece = b""
        if self._has_text(token_id):
            piece = self._tokens.of(tuple(self._pushed), token_id)
            self._pushed.append(token_id)
        elif self._special_of is not None and token_id not in self._end_ids:
            piece = self._special_of.decode([token_id], skip_special=False).encode()
        self._held.append((token_id, piece))
        before_bytes = self._pushed_bytes
        self._pushed_bytes += len(piece)
        may_stop = self._free_tokens <= 0
        self._free_tokens -= 1
        if self._words is None:
            return
        for index, byte in enumerate(piece, 1):
            self._state = self._words.step(self._state, byte)
            length_bytes = self._words.match_bytes[self._state]
            if may_stop and length_bytes:
                self._stop_at_bytes = before_bytes + index - length_bytes
                return

    def _release(self) -> OutputDelta:
        context_ids = tuple(self._released)
        limit_bytes = self._limit_bytes()
        is_cut = self.is_stopped
        token_ids: list[int] = []
        pieces: list[bytes] = []
        while self._held and self._released_bytes + len(self._held[0][1]) <= limit_bytes:
            token_id, piece = self._held.popleft()
            token_ids.append(token_id)
            pieces.append(piece)
            self._released_bytes += len(piece)
            if self._has_text(token_id):
                self._released.append(token_id)
            elif token_id in self._end_ids and self._tokens.has_text(token_id):
                is_cut = True  # an `end_ids` token, whose text `new_text` would otherwise show
        if self.is_stopped:
            if self._held and self._released_bytes < limit_bytes:
                token_id, piece = self._held.popleft()
                token_ids.append(token_id)
                pieces.append(piece[: limit_bytes - self._released_bytes])
            self._held.clear()
            self._released_bytes = self._pushed_bytes = limit_bytes
        elif self._is_finished:
            pieces.append(self._tokens.ending(tuple(self._pushed)))
        text = self._decoder.decode(b"".join(pieces), self._is_finished or self.is_stopped)
        cut_bytes = len(text.encode()) if is_cut else -1
        logprobs: tuple[TokenLogprobs, ...] = ()
        if self._logprobs:
            logprobs = tuple(self._logprobs.popleft() for _ in token_ids)
        return OutputDelta(
            tuple(token_ids), text, cut_bytes, self.is_stopped, context_ids, logprobs
        )

    def _limit_bytes(self) -> int:
        """Bytes before this position may be released, because no stop word can begin in them."""
        if self.is_stopped:
            return self._stop_at_bytes
        if self._is_finished or self._words is None:
            return self._pushed_bytes
        return self._pushed_bytes - self._words.depth_bytes[self._state]

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._end_ids and self._tokens.has_text(token_id)


def _context(tokens: TokenBytes, token_ids: Sequence[int]) -> deque[int]:
    """The last CONTEXT_TOKENS tokens that have text."""
    found: deque[int] = deque(maxlen=CONTEXT_TOKENS)
    for token_id in reversed(token_ids):
        if tokens.has_text(token_id):
            found.appendleft(token_id)
            if len(found) == CONTEXT_TOKENS:
                break
    return found


def _decoder_after(tokens: TokenBytes, context_ids: Iterable[int]) -> codecs.IncrementalDecoder:
    """A decoder that holds the bytes of the character that `context_ids` left unfinished.

    The context's last three bytes are enough, because a character has at most four bytes.
    """
    ids = tuple(context_ids)
    tail = b""
    for index in reversed(range(len(ids))):
        tail = tokens.of(ids[:index], ids[index]) + tail
        if len(tail) >= CHARACTER_BYTES_MAX - 1:
            break
    decoder = _Utf8Decoder("replace")
    decoder.decode(tail)
    return decoder
