"""Text from tokens while they come: whole characters only, never taken back, stop words cut off.

Everything happens on bytes. A token adds bytes (token_bytes.py), stop words are found in bytes
(`StopWords`), and a decoder makes characters of the bytes that are *released*: an unfinished
character waits in the decoder, bytes that can no longer become one turn into U+FFFD. Text that may
still become a stop word is held back together with its tokens, so ids and text always belong
together: the text of an OutputDelta is the text of its token ids.

The postprocessing model has no state. It gets an OutputDelta's ids with up to 16 `context_ids`
before them and computes the same text with `new_text`: a token's bytes depend on that context at
most, and where an unfinished character begins can be seen from the last three bytes. (A test
compares the two for random tokens, cut in random places.)

Stop words are found at a constant cost per byte (Aho-Corasick). UTF-8 never hides a character
inside another, so matching bytes finds exactly what matching characters would, wherever tokens
begin. The word whose last byte comes first wins, whatever the size of the pieces that arrive; of
those that end at the same byte the longest.

Rules worth knowing:

* special tokens, `end_ids` and ids outside the vocabulary have no text and are released in place;
* the stop word itself is not emitted. If it begins inside a token, that token is released and
  `cut_bytes` says how much of the text of the delta's ids to show;
* a stop word that is complete within the first `min_tokens` tokens does not stop; one that begins
  there and is complete later does (vLLM's rule too), so fewer tokens than that may be shown;
* the context is the prompt's end: a request that moves to another worker gives what the client
  has, and finds every stop word that the first worker would have found.

Not here: limits on stop words (engine/sampling_params.py).
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
    """An automaton; its states are the beginnings of words, state 0 is none."""

    def __init__(self, words: Sequence[str]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._fallback = [0]  # the longest other beginning that the state ends with
        self.depth_bytes = [0]  # length of the beginning: so much must be held back
        self.match_bytes = [0]  # length of the longest word that the state ends with; 0: none
        for word in words:
            assert word, "the frontend refuses empty stop words"
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
        """Breadth first, so that a state's fallback, which is shorter, is ready before it."""
        waiting = deque(self._children[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, child in self._children[state].items():
                self._fallback[child] = self.step(self._fallback[state], byte)
                waiting.append(child)
            if not self.match_bytes[state]:
                self.match_bytes[state] = self.match_bytes[self._fallback[state]]


@lru_cache(maxsize=64)
def automaton_of(words: tuple[str, ...]) -> StopWords:
    """Clients send the same words with every request."""
    return StopWords(words)


CHARACTER_BYTES_MAX = 4
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What may be sent now. `text` is that of `token_ids`, up to `cut_bytes`."""

    token_ids: Sequence[int]
    text: str
    cut_bytes: int = -1  # -1: all of the text; else so many bytes of its UTF-8
    is_stopped: bool = False  # a stop word was found: nothing will follow
    context_ids: Sequence[int] = ()  # the tokens with text before token_ids, 16 at most
    logprobs: Sequence[TokenLogprobs] = ()  # of each of token_ids, or of none


def merge(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Consecutive deltas as one, for a message that carries several tokens."""
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
    """What `token_ids` add to the text; `is_final`: no token will complete the last character."""
    text = TextStream(tokenizer, context_ids).push(token_ids, is_last=is_final).text
    return text if cut_bytes < 0 else text.encode()[:cut_bytes].decode(errors="ignore")


class TextStream:
    """The text of one request. Push tokens, send what comes back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int] = (),
        stop_words: Sequence[str] = (),
        end_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokens = tokenizer.token_bytes
        self._pushed = _context(self._tokens, context_ids)  # before the next token to come
        self._released = self._pushed.copy()  # before the first held token
        self._decoder = _decoder_after(self._tokens, self._pushed)
        self._words = automaton_of(tuple(stop_words)) if stop_words else None
        self._state = 0
        self._end_ids = frozenset(end_ids)
        self._free_tokens = min_tokens  # still to come in which no stop word may end
        self._held: deque[tuple[int, bytes]] = deque()
        self._logprobs: deque[TokenLogprobs] = deque()  # of the held tokens, or of none
        self._pushed_bytes = 0
        self._released_bytes = 0
        self._stop_at_bytes = -1  # where the stop word begins
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
        """Tokens after a stop word are ignored; `is_last` releases everything.

        `logprobs`: of each of these tokens, with which they leave, or of none.
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
        """What was held back, the bytes of an unfinished character as U+FFFD."""
        return self.push((), is_last=True)

    def check(self) -> None:
        """Prove the invariants."""
        held_bytes = sum(len(piece) for _, piece in self._held)
        assert self._released_bytes + held_bytes == self._pushed_bytes
        assert len(self._pushed) <= CONTEXT_TOKENS >= len(self._released)
        if self._words is None:
            assert not self._held, f"{len(self._held)} tokens held without stop words"

    def _take(self, token_id: int) -> None:
        """Note the token's bytes and look for a stop word that ends in them."""
        piece = b""
        if self._has_text(token_id):
            piece = self._tokens.of(tuple(self._pushed), token_id)
            self._pushed.append(token_id)
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
                is_cut = True  # an end token that the request chose: others would show its text
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
        """Bytes before this are decided."""
        if self.is_stopped:
            return self._stop_at_bytes
        if self._is_finished or self._words is None:
            return self._pushed_bytes
        return self._pushed_bytes - self._words.depth_bytes[self._state]

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._end_ids and self._tokens.has_text(token_id)


def _context(tokens: TokenBytes, token_ids: Sequence[int]) -> deque[int]:
    """The last tokens that have text."""
    found: deque[int] = deque(maxlen=CONTEXT_TOKENS)
    for token_id in reversed(token_ids):
        if tokens.has_text(token_id):
            found.appendleft(token_id)
            if len(found) == CONTEXT_TOKENS:
                break
    return found


def _decoder_after(tokens: TokenBytes, context_ids: Iterable[int]) -> codecs.IncrementalDecoder:
    """A decoder that holds the character which `context_ids` left unfinished.

    A first byte always begins a character, so the last three bytes tell, whatever was before.
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
