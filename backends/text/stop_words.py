"""Finding stop words in a stream of bytes, at a constant cost per byte (Aho-Corasick).

UTF-8 never hides a character inside another, so matching bytes finds exactly what matching
characters would, wherever tokens begin. The word whose last byte comes first wins, whatever the
size of the pieces that arrive; of those that end at the same byte the longest. Not here: what is
held back while a word could still match (text_stream.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopWords:
    """An automaton; its states are the beginnings of words, state 0 is none."""

    def __init__(self, words: Sequence[str]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._fallback = [0]  # the longest other beginning that the state ends with
        self.depth_bytes = [0]  # length of the beginning: so much must be held back
        self.match_bytes = [0]  # length of the longest word that the state ends with; 0: none
        for word in words:
            assert word, "front_request refuses empty stop words"
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
def stop_words(words: tuple[str, ...]) -> StopWords:
    """Clients send the same words with every request."""
    return StopWords(words)
